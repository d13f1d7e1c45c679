"""What each rank does in test_pretrained_ranks: the gradient of a step of a pretrained model, and the step, in float64.
One rank keeps them; several, who share layers or samples, say how far theirs are from those. Run by `tests.warm`.

python -m tests.integration.pretrained_ranks MODEL OUT TENSOR CONTEXT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.learner.loading.load import load_policy
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.model.policy import Policy
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.parallel.dtensors import held_rows
from streamrl.learner.process.ranks import World, join_world
from streamrl.recipe.algorithms import make_algorithm
from tests.integration.context_ranks import never_round
from tests.learner_cases import learner_config, random_groups
from tests.leaving import leave

ALONE = "alone.safetensors"


class Rank:
    def __init__(self, model: Path, world: World) -> None:
        config = learner_config(
            model,
            model=schema.Model(path=str(model), dtype="float64", gradient_checkpointing=True),
            algorithm=schema.Algorithm(kl=schema.Kl(placement="none"), entropy_bonus=0.1),
            training=schema.Training(micro_batch_tokens=600),  # each gathers all weights
        )
        self._config, self._world = config, world
        self.policy: Policy = load_policy(config, world, (1,))
        never_round(self.policy)
        self._optimizer = make_optimizer(self.policy, config.optimizer)

    def accumulate(self) -> float:
        """This rank's share of the loss."""
        gradients = Gradients(
            policy=self.policy,
            reference=None,
            algorithm=make_algorithm(self._config.algorithm),
            config=self._config,
            world=self._world,
            beat=lambda: None,
        )
        tally = Tally(sources=tuple(self._config.rewards), step=0, is_dead=lambda _version, _step: False)
        mine = random_groups(3, vocabulary=1000)[self._world.data_rank :: self._world.data_size]
        return gradients.accumulate(gradients.prepare(mine, tally), tally)

    def step(self, loss: float) -> dict[str, float]:
        made = update(self._optimizer, loss=loss, lr=1e-3, clip_norm=1.0, world=self._world)
        assert made.applied
        return {"loss": made.loss, "grad_norm": made.grad_norm}


def keep(rank: Rank, out: Path) -> None:
    loss = rank.accumulate()
    named = dict(rank.policy.model.named_parameters())
    gradients = {f"gradient/{name}": p.grad.clone() for name, p in named.items() if p.grad is not None}
    figures = rank.step(loss) | {"most": max(float(gradient.abs().max()) for gradient in gradients.values())}
    weights = {f"weight/{name}": p.detach() for name, p in named.items()}
    safetensors.torch.save_file(gradients | weights, out / ALONE)
    (out / "alone.json").write_text(json.dumps(figures))


def compare(rank: Rank, out: Path, world: World) -> dict[str, float]:
    """How far any number of any rank is from that of one rank; and the loss and the norm."""
    with safetensors.safe_open(out / ALONE, framework="pt") as alone:

        def apart(name: str, tensor: torch.Tensor) -> float:
            first, rows = held_rows(tensor)
            expected = alone.get_slice(name)[first : first + len(rows)]
            return float((rows - expected).abs().max()) if len(rows) else 0.0

        loss = rank.accumulate()
        named = dict(rank.policy.model.named_parameters())
        assert len(alone.keys()) == 2 * len(named)
        gradient = max(apart(f"gradient/{name}", p.grad) for name, p in named.items() if p.grad is not None)
        figures = rank.step(loss)
        weight = max(apart(f"weight/{name}", p) for name, p in named.items())
    gradient, weight = world.largest(np.array([gradient, weight])).tolist()
    return figures | {"gradient": gradient, "weight": weight}


def main(model: Path, out: Path, tensor: int, context: int) -> None:
    with join_world(os.environ, timeout_s=300) as joined:
        world = joined.under(schema.Layout(tensor=tensor, context=context))
        rank = Rank(model, world)
        if world.size == 1:
            keep(rank, out)
            return
        found = compare(rank, out, world)
        if world.is_main:
            (out / f"{tensor}x{context}.json").write_text(json.dumps(found))
        world.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    leave()
