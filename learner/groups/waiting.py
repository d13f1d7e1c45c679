"""The feed's wait timers: how long it has waited, for what, and whether to reconcile, go on without, or give up.

A new group, an optimizer step and an operator's pause each restart the timer, and it does not run while no ticket is
out, since workers are not at fault then. `waits_for` names the current wait for the monitor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import structlog

from streamrl.config import schema
from streamrl.errors import TrainingError
from streamrl.telemetry.progress import Wait

_RECONCILE_AFTER_S = 60.0  # without a group for so long, tickets may be lost; reconciling is cheap
_RECONCILE_EVERY_S = 600.0  # reconcile in any case: else a bad ticket circulates while others arrive
_COMMIT_AGAIN_S = 60.0  # pause after a requested checkpoint that did not complete

log = structlog.get_logger(__name__)


class WaitTimers:
    def __init__(self, config: schema.Config, clock: Callable[[], float]) -> None:
        self.waits_for = Wait.GROUPS
        self.straggler_wait_s = 0.0  # total wait of full batches for stragglers
        self._idle_timeout_s = config.learner.idle_timeout_s
        self._longest_wait_s = config.lag.wait_s
        self._clock = clock
        self._since: float | None = None  # time of the latest group; None: a step is in progress
        self._full_since: float | None = None  # since when a full batch waits for stragglers
        self._reconciled_at = clock()
        self._commit_requested_at: float | None = None

    def begin(self) -> None:
        """Start waiting for a batch."""
        if self._since is None:
            self._since = self._clock()

    def step_follows(self) -> None:
        self._since = None

    def group_came(self) -> None:
        self._since = self._clock()

    def paused(self) -> None:
        self.waits_for = Wait.RESUME
        self.no_group_expected()
        self._full_since = None

    def no_group_expected(self) -> None:
        """Restart the timer: the run is paused, or no ticket is out as a disk, Redis or the byte budget is full."""
        self._since = self._clock()

    def batch_is_not_full(self) -> None:
        self.waits_for = Wait.GROUPS
        self._full_since = None

    @property
    def full_batch_may_wait(self) -> bool:
        """Whether a full batch has not waited for stragglers too long."""
        return self._full_wait_s < self._longest_wait_s

    def await_stragglers(self) -> None:
        """Let a full batch wait, from now or since it was full."""
        self.waits_for = Wait.STRAGGLERS
        if self._full_since is None:
            self._full_since = self._clock()

    def full_batch_goes(self, *, num_stragglers: int) -> None:
        """A full batch is trained, without this many stragglers."""
        waited_s = self._full_wait_s
        if num_stragglers:
            log.warning("continued without stragglers", tickets=num_stragglers, waited_s=round(waited_s))
        self.straggler_wait_s += waited_s
        self._full_since = None

    @property
    def _full_wait_s(self) -> float:
        return 0.0 if self._full_since is None else self._clock() - self._full_since

    def check(self, *, num_outstanding: int) -> None:
        """Raise TrainingError when groups have been awaited too long."""
        assert self._since is not None, "only called while waiting"
        waited_s = self._clock() - self._since
        if waited_s >= self._idle_timeout_s:
            raise TrainingError(
                f"no group arrived for {waited_s:.0f} s (learner.idle_timeout_s) and {num_outstanding} tickets are "
                "outstanding; check that workers run, and that they reach Redis and rewards"
            )

    @property
    def tickets_may_be_lost(self) -> bool:
        """Whether no group has come for a while."""
        assert self._since is not None, "only asked while waiting"
        return self._clock() - max(self._since, self._reconciled_at) >= _RECONCILE_AFTER_S

    @property
    def reconcile_is_due(self) -> bool:
        return self._clock() - self._reconciled_at >= _RECONCILE_EVERY_S

    def reconcile_soon(self) -> None:
        """A ticket may be missing: reconcile before the next batch."""
        self._reconciled_at = -math.inf

    def reconciled(self) -> None:
        self._reconciled_at = self._clock()

    @property
    def may_request_commit(self) -> bool:
        """Whether a commit may be requested: not too soon after one that failed."""
        return self._commit_requested_at is None or self._clock() - self._commit_requested_at >= _COMMIT_AGAIN_S

    def commit_requested(self) -> None:
        self._commit_requested_at = self._clock()

    def committed(self) -> None:
        self._commit_requested_at = None
