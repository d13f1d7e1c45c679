"""Schedules validations on rank 0, and writes their scores to checkpoints.

    step to be validated ─► due ─► a version with its weights, or newer ones, is published ─► runs beside training
                                                                                               │ rounds later
                       checkpoint of that step: validation.json ◄── score ◄── result ──────────┘

One validation runs at a time and is left to finish; one that lacks many answers scores no checkpoint. Blocks on Redis
when it starts, for as long as Redis may be away, and otherwise at most `wait_s` in `poll`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.scores import write_score
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.process.lease import redis_may_be_away
from streamrl.versions import term_of

if TYPE_CHECKING:
    from streamrl.learner.metrics.record import Recorder, ValidationResult
    from streamrl.learner.publishing.shipping import Published
    from streamrl.learner.validation.validation import Validation

log = structlog.get_logger(__name__)


class ValidationSchedule:
    def __init__(self, *, validation: Validation | None, checkpoints: CheckpointRoot, recorder: Recorder) -> None:
        self._validation, self._checkpoints, self._recorder = validation, checkpoints, recorder
        self._due: int | None = None  # step whose weights are to be validated once published
        self._scored: frozenset[CheckpointName] = frozenset()  # checkpoints that the running validation scores
        self._newest: ValidationResult | None = None
        self._scores: dict[CheckpointName, Mapping[str, float]] = {}  # of checkpoints that may not exist yet

    @property
    def running(self) -> bool:
        return self._validation is not None and self._validation.running

    def start(self, step: int, latest: Published | None) -> None:
        """Validate the weights of this step, or the next published ones, as soon as workers can have them."""
        if self._validation is None or self.running:
            return
        self._due = step
        if latest is not None:
            self.note_published(latest)

    def note_published(self, latest: Published) -> None:
        if self._validation is None or self._due is None or latest.step < self._due:
            return
        due, self._due = self._due, None
        if self._newest is not None and self._newest.complete and self._newest.version == latest.version:
            return  # already validated completely
        with redis_may_be_away("validation not started"):
            self._validation.start(step=latest.step, version=latest.version)
            self._scored = frozenset(CheckpointName(term_of(latest.version), step) for step in (due, latest.step))

    def poll(self, *, wait_s: float, paused: bool = False) -> None:
        """Process answers that have come, and record the result once it is complete. `paused` time does not count."""
        if self._validation is None:
            return
        result = None  # stays None if Redis is away: the block is left early
        with redis_may_be_away("validation not polled"):
            result = self._validation.poll(wait_s=wait_s, paused=paused)
        if result is not None:
            names, self._newest, self._scored = self._scored, result, frozenset()
            self._recorder.validation(result)
            for name in names if result.ranks else ():
                self._scores[name] = result.metrics
                self._write_score(name)

    def note_committed(self, name: CheckpointName) -> None:
        """Write the checkpoint's score, if its weights were validated while it was being written."""
        self._write_score(name)
        self._scores = {other: metrics for other, metrics in self._scores.items() if other >= name}

    def _write_score(self, name: CheckpointName) -> None:
        if name not in self._scores:
            return
        try:
            write_score(self._checkpoints.folder_of(name), self._scores[name])
        except OSError as error:
            log.warning("checkpoint score not written", checkpoint=str(name), error=str(error))

    def undecided(self, term: int) -> frozenset[CheckpointName]:
        """This term's checkpoints that may still turn out to be the best."""
        return self._scored if self._due is None else self._scored | {CheckpointName(term, self._due)}
