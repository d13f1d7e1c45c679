"""Rank 0's part of a checkpoint: it seals the stream's state of the copied step while ranks write their shards.

begin_commit: the state ─► seal: manifest, rename ─► announce: Redis, score ─► prune: older ones
loop                       thread                    loop                      thread
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from streamrl.config import schema
from streamrl.learner.checkpoints.checkpoint import Checkpoint, CheckpointRoot, CheckpointState
from streamrl.learner.checkpoints.sealed import Files
from streamrl.learner.checkpoints.terms import CheckpointName, ancestry
from streamrl.learner.process.lease import redis_may_be_away
from streamrl.learner.validation.schedule import ValidationSchedule

if TYPE_CHECKING:
    from streamrl.learner.groups.feed import Feed

log = structlog.get_logger(__name__)


class Commit:
    def __init__(
        self,
        name: CheckpointName,
        state: CheckpointState,
        *,
        checkpoints: CheckpointRoot,
        settings: schema.Checkpoint,
        feed: Feed,
        validation_schedule: ValidationSchedule,
        event: Callable[..., None],  # records an event in the run's stream
    ) -> None:
        self._name, self._state, self._checkpoints, self._settings = name, state, checkpoints, settings
        self._feed, self._validation_schedule, self._event = feed, validation_schedule, event
        self._sealed: Checkpoint | None = None
        self._undecided: frozenset[CheckpointName] = frozenset()

    def seal(self, files: Files) -> None:
        """Make it the newest checkpoint. Blocks on the disk."""
        self._sealed = self._checkpoints.commit(self._name, self._state, files=files)

    def announce(self) -> None:
        """Update Redis and the validation schedule. Blocks on Redis, within its limits."""
        assert self._sealed is not None, "only called after `seal`"
        with redis_may_be_away("checkpoint not announced, the next one includes it"):
            self._feed.committed(self._sealed.state.stream, step=self._name.step)
        self._validation_schedule.note_committed(self._name)
        self._undecided = self._validation_schedule.undecided(self._name.term)
        self._event("checkpoint", name=str(self._name), step=self._name.step)

    def prune(self) -> None:
        """Remove checkpoints that need not be kept. Blocks on the disk."""
        try:
            self._checkpoints.prune(
                ancestry(self._checkpoints.root),
                term=self._name.term,
                keep_last=self._settings.keep_last,
                keep_best=self._settings.keep_best,
                best_by=self._settings.best_by,
                keep=self._undecided,
            )
        except OSError as error:
            log.warning("old checkpoints not removed", error=str(error))


class NoCommit:
    """The counterpart on every rank except rank 0."""

    def seal(self, files: Files) -> None: ...

    def announce(self) -> None: ...

    def prune(self) -> None: ...
