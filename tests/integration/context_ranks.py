"""What each rank does in test_context_ranks: gradients of several algorithms, and a step, with samples shared out over
ranks by their length. Run by `tests.warm`.

python -m tests.integration.context_ranks FOLDER REPLICAS CONTEXT CASE...    models: FOLDER/CASE; results: beside them
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.learner.loading.load import load_policy, load_reference
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.frozen import frozen_logprobs
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.packing.attention import VARLEN
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.ranks import World, join_world
from streamrl.protocol.wire.group import Group
from streamrl.recipe.algorithms import make_algorithm
from tests.learner_cases import branched, learner_config, random_groups
from tests.leaving import leave
from tests.tiny_families import make_family

END = 1  # of the tiny tokenizer
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "gspo, kl in the reward": {"loss": "gspo", "kl": schema.Kl(placement="reward", coefficient=0.1)},
    "entropy, kl in the loss": {
        "loss": "ppo",
        "entropy_bonus": 0.1,
        "normalize_batch": True,
        "loss_mean": "token",
        "kl": schema.Kl(placement="loss", estimator="k3", coefficient=0.3),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    family: str
    settings: Mapping[str, Any]  # of the model
    attention: str = "masked"
    checkpointing: bool = False
    dtype: str = "float64"
    lora: Mapping[str, Any] | None = None


_HEADS = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
# Of which two, four and eight ranks have 5 and 4; 3, 3, 3 and none; 2, 2, 2, 2, 1 and none
_NINE = {**_HEADS, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
CASES: Mapping[str, Case] = {
    "llama": Case(family="llama", settings={**_HEADS, "num_key_value_heads": 2}, checkpointing=True),
    "varlen": Case(family="qwen3", settings={**_HEADS, "num_key_value_heads": 4}, attention="varlen"),
    "gemma": Case(family="gemma3_text", settings={**_HEADS, "num_key_value_heads": 1}),
    "gpt_oss": Case(family="gpt_oss", settings={**_HEADS, "num_key_value_heads": 2}),
    "nine": Case(family="qwen3", settings=_NINE, attention="varlen"),
    "nine_sinks": Case(family="gpt_oss", settings=_NINE),
    "narrow": Case(family="qwen3", settings={**_HEADS, "num_key_value_heads": 2}, dtype="float32"),
}


def make_models(folder: Path) -> None:
    for name, case in CASES.items():
        make_family(folder / name, case.family, **case.settings)


def never_round(policy: Policy) -> None:
    """Norms of models are computed in fp32, whatever they are given."""
    for module in policy.modules():
        if "RMSNorm" in type(module).__name__:
            assert isinstance(module.weight, torch.Tensor)
            module.forward = partial(_norm, module, 1 if "Gemma" in type(module).__name__ else 0)


def _norm(module: Any, offset: int, hidden: torch.Tensor) -> torch.Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return torch.nn.functional.rms_norm(hidden, module.weight.shape, module.weight + offset, eps)


def groups_of_a_step(number: int) -> list[Group]:
    """Of all lengths; some of several rows; the last step has one group, so that of two shares one is empty."""
    groups = random_groups(5, seed=number)
    return [*groups[:3], *branched(groups[3:])] if number else groups[:1]


class Rank:
    def __init__(self, folder: Path, world: World, case: Case) -> None:
        self.world = world
        self.config = learner_config(
            folder,
            model=schema.Model.model_validate(
                {
                    "path": str(folder),
                    "dtype": case.dtype,
                    "attention": case.attention,
                    "gradient_checkpointing": case.checkpointing,
                    "lora": case.lora,
                }
            ),
            training=schema.Training(micro_batch_tokens=40),
        )
        torch.manual_seed(0)
        self.policy = load_policy(self.config, world, (END,))
        assert (self.policy.way.attention == VARLEN) == (case.attention == "varlen"), "asked in the way that is meant"
        frozen = self.policy if case.lora else load_reference(self.config, world, (END,), like=self.policy)
        if case.dtype == "float64":
            for policy in {self.policy, frozen}:
                never_round(policy)
        self._reference = frozen_logprobs(frozen)
        self.optimizer = make_optimizer(self.policy, self.config.optimizer)

    def learn(self, settings: Mapping[str, Any], groups: Sequence[Group]) -> tuple[float, Tally]:
        """(this rank's share of the loss, what it counted)"""
        config = self.config.model_copy(update={"algorithm": schema.Algorithm(**settings)})
        gradients = Gradients(
            policy=self.policy,
            reference=self._reference,
            algorithm=make_algorithm(config.algorithm),
            config=config,
            world=self.world,
            beat=lambda: None,
        )
        tally = Tally(sources=tuple(config.rewards), step=0, is_dead=lambda _version, _step: False)
        mine = groups[self.world.data_rank :: self.world.data_size]
        return gradients.accumulate(gradients.prepare(mine, tally), tally), tally


def learnt(rank: Rank) -> dict[str, torch.Tensor]:
    """Gradients of each algorithm; then steps, with their metrics and what they made of the weights."""
    world, found = rank.world, dict[str, torch.Tensor]()
    parameters = dict(rank.policy.model.named_parameters())
    for algorithm, settings in ALGORITHMS.items():
        loss, tally = rank.learn(settings, groups_of_a_step(3))
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        found |= {f"{algorithm}/{name}": whole(gradient).clone() for name, gradient in gradients.items()}
        found |= {f"{algorithm}/{key}": _number(value) for key, value in tally.metrics(world).items()}
        rank.optimizer.zero_grad()
    for number, settings in enumerate(ALGORITHMS.values()):
        loss, _ = rank.learn(settings, groups_of_a_step(number))
        made = update(rank.optimizer, loss=loss, lr=1e-3, clip_norm=1.0, world=world)
        assert made.applied
        found |= {f"step {number}/loss": _number(made.loss), f"step {number}/norm": _number(made.grad_norm)}
    return found | {f"weights/{name}": whole(p).clone() for name, p in parameters.items()}


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def out_name(size: int, replicas: int, context: int) -> str:
    return f"{size}-{replicas}-{context}.safetensors"


def main(folder: Path, replicas: int, context: int, names: Sequence[str]) -> None:
    with join_world(os.environ, timeout_s=240) as joined:
        world = joined.under(schema.Layout(replicas=replicas, context=context))
        for name in names:
            found = learnt(Rank(folder / name, world, CASES[name]))
            if world.is_main:
                safetensors.torch.save_file(found, folder / name / out_name(world.size, replicas, context))
            world.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    leave()
