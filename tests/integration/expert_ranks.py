"""What each rank does in test_expert_ranks: a gradient and a step of mixtures under some layouts, steps from a
checkpoint to the next, versions of given weights. Run by `tests.warm`.

python -m tests.integration.expert_ranks FOLDER JOB,... EXPERTSxREPLICASxCONTEXTxTENSOR...    FOLDER/<family> exists
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from streamrl.config import schema
from streamrl.learner.loading.load import load_policy
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.moe.routing_replay import RoutingReplay
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.ranks import World, join_world
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.routes import RouteShape, missing_in
from streamrl.recipe.algorithms import make_algorithm
from tests.integration import layout_ranks
from tests.integration.layout_ranks import state_of
from tests.integration.learner_ranks import keep, never_round
from tests.learner_cases import learner_config, random_groups
from tests.leaving import leave
from tests.mixtures import MIXTURES, never_round_routers, replay_never_rounding
from tests.unit.test_wire_routes import random_routes

END = 1  # of the tiny tokenizer
CASES = (*((family, "float64") for family in MIXTURES), ("qwen3_moe", "float32"))
RESUMED = "qwen3_moe"
_WITH_ALL_CASES = ("1-1x1x1x1", "2-2x1x1x1", "4-4x1x2x1", "2-1x1x1x2", "4-4x1x1x2")  # and whatever eight ranks do


def name_of(world: World) -> str:
    layout = world.layout
    return f"{world.size}-{layout.experts}x{layout.replicas}x{layout.context}x{layout.tensor}"


def cases_of(name: str) -> Sequence[tuple[str, str]]:
    """(family, dtype) of what is learnt in the layout of this name. Of gpt-oss ranks share no layers."""
    found = CASES if name in _WITH_ALL_CASES or name.startswith("8-") else CASES[:1]
    return found if name.endswith("x1") else [case for case in found if case[0] != "gpt_oss"]


class Rank:
    """One rank with its part of a mixture, whose routers have terms of their own in the loss. `told`: and are told whom
    to choose."""

    def __init__(self, folder: Path, family: str, world: World, dtype: str, *, told: bool = False) -> None:
        path = folder / family
        model = schema.Model(
            path=str(path),
            dtype=dtype,
            router_balance=0.1,
            router_z=0.01,
            gradient_checkpointing=family == "qwen3_moe",
        )
        self.config = learner_config(
            path,
            dir=folder / "runs",
            model=model,
            algorithm=schema.Algorithm(kl=schema.Kl(placement="none"), routing_replay="rollout" if told else "none"),
            training=schema.Training(micro_batch_tokens=40),
            weights=schema.Weights(dtype="bfloat16"),
        )
        self.world = world
        self.policy = load_policy(self.config, world, (END,))
        if told:
            self.policy.replay = RoutingReplay(self.policy.model, self.config, split=self.policy.split)
        if dtype == "float64":
            never_round(self.policy)
            never_round_routers(self.policy)
        self.optimizer = make_optimizer(self.policy, self.config.optimizer)
        self.gradients = Gradients(
            policy=self.policy,
            reference=None,
            algorithm=make_algorithm(self.config.algorithm),
            config=self.config,
            world=world,
            beat=lambda: None,
        )

    def accumulate(self, number: int, *, num_groups: int = 5) -> tuple[float, Tally]:
        groups = random_groups(num_groups, seed=number)[self.world.data_rank :: self.world.data_size]
        if (shape := self.policy.routes_wanted) is not None:
            groups = [routed(group, shape) for group in groups]
        tally = Tally(sources=tuple(self.config.rewards), step=number, is_dead=lambda _version, _step: False)
        return self.gradients.accumulate(self.gradients.prepare(groups, tally), tally), tally

    def step(self, number: int, *, lr: float = 1e-3) -> None:
        # With more ranks than groups, some get nothing.
        loss, _ = self.accumulate(number, num_groups=1 if number % 2 else 5)
        update(self.optimizer, loss=loss, lr=lr, clip_norm=1.0, world=self.world)


def learn(folder: Path, world: World) -> None:
    for family, dtype in cases_of(name_of(world)):
        found, metadata = learnt(folder, family, world, dtype)
        keep(found, folder / f"{family}-{dtype}-{name_of(world)}.safetensors", world, metadata)


def replay(folder: Path, world: World) -> None:
    with replay_never_rounding():
        found, metadata = learnt(folder, RESUMED, world, "float64", told=True)
    keep(found, folder / f"told-{name_of(world)}.safetensors", world, metadata)


def routed(group: Group, shape: RouteShape) -> Group:
    """By experts at random, which follow from its ticket; some tokens have no route."""
    samples = tuple(
        sample._replace(routes=random_routes(len(sample.token_ids), shape, seed=100 * group.header.ticket + at))
        for at, sample in enumerate(group.samples)
    )
    for sample in samples:
        assert sample.routes is not None
        sample.routes[-1:] = missing_in(sample.routes)
    of_prompt = random_routes(len(group.prompt_ids), shape, seed=100 * group.header.ticket + 99)
    return replace(group, samples=samples, prompt_routes=of_prompt)


def learnt(
    folder: Path, family: str, world: World, dtype: str, *, told: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(gradients, and all state after one step; the loss and metrics of routers)"""
    rank = Rank(folder, family, world, dtype, told=told)
    loss, tally = rank.accumulate(0)
    found = {f"gradient/{name}": whole(p.grad).clone() for name, p in rank.policy.named_parameters()}
    made = update(rank.optimizer, loss=loss, lr=1e-4, clip_norm=1.0, world=world)
    figures = {"loss": made.loss, "grad_norm": made.grad_norm, **tally.metrics(world)}
    return found | state_of(rank.policy, rank.optimizer), {name: repr(value) for name, value in figures.items()}


def go_on(folder: Path, world: World) -> None:
    layout_ranks.go_on(Rank(folder, RESUMED, world, "float64"), folder)


def serve(folder: Path, world: World) -> None:
    layout_ranks.serve(Rank(folder, RESUMED, world, "float32"), folder, folder / f"served-{name_of(world)}")


JOBS: Mapping[str, Callable[[Path, World], None]] = {"learn": learn, "replay": replay, "go_on": go_on, "serve": serve}

if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs, layouts = sys.argv[2].split(","), sys.argv[3:]
    with join_world(os.environ, timeout_s=240) as joined:
        for layout in layouts:
            experts, replicas, context, tensor = map(int, layout.split("x"))
            divided = schema.Layout(experts=experts, replicas=replicas, context=context, tensor=tensor)
            world = joined.under(divided)
            for job in jobs:
                JOBS[job](Path(sys.argv[1]), world)
                world.barrier()  # a rank that leaves closes connections from which others may still read
    leave()
