"""Runs one engine after another: what happens when one dies, hangs, or does not serve what it was told to load.

    engine ─► rollout ─┬─► stop, or the run ended: return
       ▲               ├─► EngineError: a new engine, after a backoff; gives up after a few in a row without a group
       │               └─► LoadRejected: 1. fetch the weights again    2. a new engine, at a random moment
       └───────────────────────────────  3. deliver nothing, and report so, until a newer version is proved

A version that no engine can serve is rejected by the whole fleet at once. Each worker therefore waits a random time
before it starts a new engine, and tries a newer version with the old engine if one arrives first. However a rollout
ends, it has handed its tickets back. Blocks on the engine's start and, while nothing may be delivered, on newer
versions, for `weights.give_up_after_s` at most. Every wait ends when a stop is requested.

`after_term`: on a GPU that others use too, the first engine starts only once the learner of this term has announced
weights, so its model is already in memory: whatever a neighbour allocates while vLLM measures free memory shrinks
vLLM's own cache. Read in vLLM's code; no GPU has run this.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from streamrl.errors import EngineError, LoadRejected
from streamrl.tasks import unless
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.engines.base import Engine
from streamrl.workers.rollout.roles import Work
from streamrl.workers.weights.roles import Weights

log = structlog.get_logger(__name__)

_MAX_ENGINE_FAILURES = 3  # in a row, without a group delivered in between


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPatience:
    first_pause_s: float = 1.0  # backoff before a new engine; doubles each time
    spread_s: float  # after a second rejection, the new engine starts at a random moment within this time
    rejected_s: float  # how long no version may be proved before the worker ends


class Supervisor:
    def __init__(
        self,
        *,
        rollout: Work,
        weights: Weights,
        make_engine: Callable[[], Engine],
        progress: Progress,
        patience: RestartPatience,
        after_term: int | None = None,
    ) -> None:
        self._after_term = after_term
        self._rollout = rollout
        self._weights = weights
        self._make_engine = make_engine
        self._progress = progress
        self._patience = patience
        self._failures = 0  # of engines, in a row
        self._rejections = 0  # of versions, in a row
        self._rejected_since = 0.0
        self._replace_at = 0.0  # when to replace the rejecting engine; math.inf: it has been replaced already
        self._num_restarts = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Run engines until the rollout is over."""
        if self._after_term is not None:
            with self._progress.waiting(Wait.WEIGHTS):
                await unless(stop, self._weights.announced_in(self._after_term))
        while not stop.is_set():
            engine = self._make_engine()
            try:
                if await self._work_with(engine, stop):
                    return
            finally:
                await engine.stop()
            await self._pause(stop)

    async def _work_with(self, engine: Engine, stop: asyncio.Event) -> bool:
        """Return whether the rollout is over; otherwise another engine is needed."""
        delivered = self._rollout.counts.groups_delivered
        try:
            self._progress.starting("start the engine")
            await unless(stop, engine.start())
            while not stop.is_set():
                proved = self._weights.num_proved
                try:
                    await self._rollout.run(engine, stop)
                    return True
                except LoadRejected as error:
                    if not await self._survive_rejection(error, stop, again=self._weights.num_proved == proved):
                        return False
        except EngineError as error:
            self._note_failure(error, stop, again=self._rollout.counts.groups_delivered == delivered)
        return stop.is_set()

    def _note_failure(self, error: EngineError, stop: asyncio.Event, *, again: bool) -> None:
        self._failures = self._failures + 1 if again else 1
        if self._failures >= _MAX_ENGINE_FAILURES and not stop.is_set():
            raise EngineError(f"the engine failed {self._failures} times in a row; the last time: {error}") from error
        log.warning("engine_failed", failures_in_row=self._failures, error=str(error))

    async def _survive_rejection(self, error: LoadRejected, stop: asyncio.Event, *, again: bool) -> bool:
        """Return whether to go on with the same engine."""
        now = time.monotonic()
        self._rejections = self._rejections + 1 if again else 1
        if self._rejections == 1:
            self._rejected_since = now
        elif self._rejections == 2:
            self._replace_at = now + random.uniform(0.0, self._patience.spread_s)
        log.error("load_rejected", rejections_in_row=self._rejections, error=str(error))
        self._weights.distrust_mirror()
        if self._rejections == 1:
            return True
        give_up_at = self._rejected_since + self._patience.rejected_s
        until = min(self._replace_at, give_up_at)
        if now < until and await self._newer_version(stop, until=until):
            return True
        if self._replace_at < give_up_at:
            self._replace_at = math.inf
            return False
        raise LoadRejected(
            f"no version was proved for {self._patience.rejected_s:g} s (weights.give_up_after_s), so nothing was "
            f"delivered. The last rejection: {error}"
        ) from error

    async def _newer_version(self, stop: asyncio.Event, *, until: float) -> bool:
        """Wait for a newer version or a stop; return whether one came in time."""
        with self._progress.waiting(Wait.WEIGHTS):
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await unless(stop, self._weights.newer_than(self._weights.attempted))
            except TimeoutError:
                return stop.is_set()
        return True

    async def _pause(self, stop: asyncio.Event) -> None:
        self._num_restarts += 1
        self._progress.note(engine_restarts=self._num_restarts)
        pause_s = self._patience.first_pause_s * 2**self._failures * random.uniform(0.5, 1.0)
        with self._progress.waiting(Wait.ENGINE):
            await unless(stop, asyncio.sleep(pause_s))
