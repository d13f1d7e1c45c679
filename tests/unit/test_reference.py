"""The reference is the policy before the run, to the last bit: after steps, after a resume, and under LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config import schema
from streamrl.learner.checkpoints.shard import load_state
from streamrl.learner.loading.load import load_policy, load_reference
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.objective.frozen import FrozenLogprobs, frozen_logprobs, make_reference
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.optimizer import make_optimizer, update
from streamrl.learner.process.ranks import World
from streamrl.recipe.algorithms import make_algorithm
from tests.learner_cases import learner_config, random_groups
from tests.shards import write_shard
from tests.tiny_models import make_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
RS: dict[str, Any] = {"name": "rejection_sampling"}


class Run:
    """A policy that learns, from the model or from a checkpoint; with adapters the base is its reference."""

    def __init__(
        self, folder: Path, *, lora: bool = False, on_host: bool = False, algorithm: dict[str, Any] | None = None
    ) -> None:
        adapters = schema.Lora(rank=4) if lora else None
        model = schema.Model(path=str(folder), dtype="float32", lora=adapters)
        self.config = learner_config(folder, model=model, algorithm=schema.Algorithm(**(algorithm or {})))
        torch.manual_seed(0)
        self.policy = load_policy(self.config, ALONE, (1,))
        self.optimizer = make_optimizer(self.policy, self.config.optimizer)
        frozen = load_reference(self.config, ALONE, (1,), on_host=True) if on_host else None
        self.ask = frozen_logprobs(frozen) if frozen else make_reference(self.config, ALONE, (1,), self.policy)

    def step(self, number: int) -> None:
        gradients = self.gradients(self.ask)
        tally = Tally(sources=(), step=number, is_dead=lambda _version, _step: False)
        loss = gradients.accumulate(gradients.prepare(random_groups(3, seed=number), tally), tally)
        assert update(self.optimizer, loss=loss, lr=1e-2, clip_norm=1.0, world=ALONE).applied

    def gradients(self, reference: FrozenLogprobs) -> Gradients:
        return Gradients(
            policy=self.policy,
            reference=reference,
            algorithm=make_algorithm(self.config.algorithm),
            config=self.config,
            world=ALONE,
            beat=lambda: None,
        )

    def reference_logprobs(self) -> list[torch.Tensor]:
        tally = Tally(sources=(), step=0, is_dead=lambda _version, _step: False)
        batch = self.gradients(self.ask).prepare(random_groups(3, seed=99), tally)
        return [self.ask(micro_batch) for micro_batch in batch.micro_batches]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.named_parameters()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", hidden=32)


def saved(run: Run, folder: Path) -> Path:
    folder.mkdir()
    write_shard(folder, run.policy, run.optimizer, ALONE)
    return folder


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """What is sharded, if only over one rank, leaves a process group behind."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("kind", [{}, {"lora": True}, {"on_host": True}], ids=["all weights", "adapters", "on host"])
def test_steps_and_a_resume_do_not_move_the_reference_by_a_bit(
    folder: Path, tmp_path: Path, kind: dict[str, bool]
) -> None:
    run = Run(folder, **kind)
    before, start = run.reference_logprobs(), run.weights()
    for number in range(3):
        run.step(number)
    assert any(not torch.equal(now, start[name]) for name, now in run.weights().items()), "the policy did move"
    resumed = Run(folder, **kind)
    load_state(saved(run, tmp_path / "checkpoint"), resumed.policy, resumed.optimizer, ALONE)
    resumed.step(3)
    for after in (run.reference_logprobs(), resumed.reference_logprobs()):
        assert all(torch.equal(now, old) for now, old in zip(after, before, strict=True))


@pytest.mark.usefixtures("group_of_one")
def test_a_reference_that_waits_on_the_host_says_the_same_to_the_bit(folder: Path) -> None:
    here, there = Run(folder), Run(folder, on_host=True)
    both = zip(here.reference_logprobs(), there.reference_logprobs(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in both)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_rejection_sampling_goes_on_after_a_resume_as_if_nothing_had_been(
    folder: Path, tmp_path: Path, lora: bool
) -> None:
    whole, first, second = (Run(folder, lora=lora, algorithm=RS) for _ in range(3))
    for number in range(4):
        whole.step(number)
    for number in range(2):
        first.step(number)
    load_state(saved(first, tmp_path / "checkpoint"), second.policy, second.optimizer, ALONE)
    for number in (2, 3):
        second.step(number)
    after, expected = second.weights(), whole.weights()
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_rejection_sampling_trains_adapters_alone(folder: Path) -> None:
    run = Run(folder, lora=True, algorithm=RS)
    start = run.weights()
    run.step(0)
    moved = {name for name, now in run.weights().items() if not torch.equal(now, start[name])}
    assert moved
    assert all("lora_" in name for name in moved)
