"""What each rank does in test_tensor_ranks: what models learn whose layers are shared under some layouts, steps from a
checkpoint to the next, versions of given weights. Run by `tests.warm`.

python -m tests.integration.tensor_ranks FOLDER JOB,... TENSORxREPLICASxCONTEXT...    FOLDER/<case> exists
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from streamrl.config import schema
from streamrl.learner.model.lora import adapter_parameters, merged_parameters, published_parameters
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.optimizer import update
from streamrl.learner.parallel.dtensors import held_rows, whole
from streamrl.learner.process.ranks import World, join_world
from tests.integration import context_ranks, layout_ranks
from tests.integration.context_ranks import ALGORITHMS, Case, groups_of_a_step, learnt
from tests.integration.learner_ranks import keep
from tests.leaving import leave

_SHARED = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
}
# Of a rank that nothing divides.
_LORA = {"rank": 3, "targets": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]}
CASES: Mapping[str, Case] = {
    "biased": Case(family="llama", settings={**_SHARED, "attention_bias": True, "mlp_bias": True}, checkpointing=True),
    "qwen2": Case(family="qwen2", settings={**_SHARED, "tie_word_embeddings": True}),
    "qwen3": Case(family="qwen3", settings=_SHARED, attention="varlen", checkpointing=True),
    "narrow": Case(family="qwen3", settings=_SHARED, dtype="float32"),
    "adapted": Case(
        family="llama", settings={**_SHARED, "attention_bias": True, "mlp_bias": True}, lora=_LORA, checkpointing=True
    ),
    "adapted, narrow": Case(family="qwen3", settings=_SHARED, lora=_LORA, dtype="float32", attention="varlen"),
}
RESUMED, SERVED = ("qwen3", "adapted"), "narrow"
MERGED = "adapted, narrow"


def name_of(world: World) -> str:
    return f"{world.size}-{world.layout.tensor}x{world.layout.replicas}x{world.layout.context}"


class Rank(context_ranks.Rank):
    def __init__(self, folder: Path, name: str, world: World) -> None:
        super().__init__(folder / name, world, CASES[name])
        give_adapters(self.policy)

    def step(self, number: int, *, lr: float = 1e-3) -> None:
        """With one group, as some steps have, ranks beyond the first of those with samples of their own have none."""
        loss, _ = self.learn(list(ALGORITHMS.values())[number % 2], groups_of_a_step(number % 2))
        assert update(self.optimizer, loss=loss, lr=lr, clip_norm=1.0, world=self.world).applied


@torch.no_grad()
def give_adapters(policy: Policy) -> None:
    """Values to the factors that begin as zeros, so that those before them learn from the first step."""
    generator = torch.Generator().manual_seed(7)
    for _, factor in sorted(adapter_parameters(policy.model)):
        drawn = torch.randn(factor.shape, generator=generator, dtype=torch.float64)
        first, rows = held_rows(factor)
        rows.copy_(0.1 * drawn[first : first + len(rows)])


def learn(folder: Path, world: World) -> None:
    for name in CASES:
        keep(learnt(Rank(folder, name, world)), folder / f"{name}-{name_of(world)}.safetensors", world)


def go_on(folder: Path, world: World) -> None:
    for name in RESUMED:
        layout_ranks.go_on(Rank(folder, name, world), folder / name)


def merge(folder: Path, world: World) -> None:
    """What is published of adapters, and what is served in place of what they are for."""
    rank = Rank(folder, MERGED, world)
    published = {name: whole(p).bfloat16() for name, p in published_parameters(rank.policy.model)}
    served = {f"served/{name}": whole(p) for name, p in merged_parameters(rank.policy.model, torch.bfloat16)}
    keep(published | served, folder / f"merged-{name_of(world)}.safetensors", world)


def serve(folder: Path, world: World) -> None:
    layout_ranks.serve(Rank(folder, SERVED, world), folder, folder / f"served-{name_of(world)}")


JOBS: Mapping[str, Callable[[Path, World], None]] = {"learn": learn, "go_on": go_on, "serve": serve, "merge": merge}

if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs, layouts = sys.argv[2].split(","), sys.argv[3:]
    with join_world(os.environ, timeout_s=240) as joined:
        for layout in layouts:
            tensor, replicas, context = map(int, layout.split("x"))
            world = joined.under(schema.Layout(tensor=tensor, replicas=replicas, context=context))
            for job in jobs:
                JOBS[job](Path(sys.argv[1]), world)
                world.barrier()  # a rank that leaves closes connections from which others may still read
    leave()
