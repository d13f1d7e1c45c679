"""What every rank must know before the first step: rank 0 makes it once it has the run, and broadcasts it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from streamrl.config import schema
from streamrl.learner.admission.claim import Claimed
from streamrl.learner.checkpoints.terms import CheckpointName, Lineage
from streamrl.learner.groups.prompts import PromptSet
from streamrl.versions import term_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    run_uid: str
    term: int
    checkpoint: CheckpointName | None  # to resume from
    lineage: Mapping[int, int | None]  # ancestor terms, each with its last valid step; None: every step
    step: int  # optimizer steps made
    first_step: int  # at which the data began; a fork with new data continues its source's step count
    consumed_samples: int
    total_steps: int  # upper bound, counted from first_step
    steps_of_data: int  # what the data suffice for if every group is trained
    canary_ids: tuple[int, ...]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Start:
        return TypeAdapter(Start).validate_json(data)

    def position(self, step: int, *, num_batches: float) -> float:
        """How far this step is on the way to the end of the run, on a scale from 0 to `total_steps`.

        The data end a run, at `num_batches` = `steps_of_data`, or `training.max_steps` if that comes first. Dropped
        groups use up data without a step, so counting steps alone would not show the first.
        """
        by_data = num_batches * self.total_steps / self.steps_of_data
        return by_data if self.total_steps == self.steps_of_data else max(by_data, step - self.first_step)

    def is_dead(self, version: int, step: int) -> bool:
        """Whether this version, made at this optimizer step, belongs to an abandoned lineage."""
        return not Lineage(self.lineage).holds(CheckpointName(term_of(version), step))


def make_start(
    config: schema.Config,
    claimed: Claimed,
    prompts: PromptSet,
    *,
    lineage: Mapping[int, int | None],
    canary_ids: tuple[int, ...],
) -> Start:
    checkpoint = claimed.checkpoint
    extra = checkpoint.state.extra if checkpoint else {}
    first_step = extra.get("first_step", 0)
    steps_of_data = -(-prompts.num_places(config.training.max_epochs) // config.training.groups_per_step)
    return Start(
        run_uid=claimed.term.run_uid,
        term=claimed.term.number,
        checkpoint=checkpoint.name if checkpoint else None,
        lineage=lineage,
        step=checkpoint.state.step if checkpoint else 0,
        first_step=first_step,
        consumed_samples=extra.get("consumed_samples", 0),
        total_steps=_total_steps(config.training, steps_of_data, first_step),
        steps_of_data=steps_of_data,
        canary_ids=canary_ids,
    )


def _total_steps(training: schema.Training, steps_of_data: int, first_step: int) -> int:
    return steps_of_data if training.max_steps < 0 else min(steps_of_data, training.max_steps - first_step)
