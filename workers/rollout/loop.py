"""The worker's main loop: lease tickets, deliver scored groups.

    lease ─► wait for the ticket's version ─► generate and score its samples ─► wait for proof ─► deliver
      ▲        (one task per ticket, no barrier; `Leases.num_to_take` decides how many)               │
      └───────────────────────────────────────────────────────────────────────────────────────────────┘
    companion tasks: renew leases; follow weights; watch the engine and the run

Blocks on tickets, on the operator's pause, on the first weights, and on rewards during an outage. If an outage lasts,
tickets waiting for scores are handed back, and the worker tries one ticket at a time until a score arrives. A group is
delivered only after every version that generated one of its tokens has been proved (see `proving`). On exit,
undelivered tickets are handed back, so that nobody has to wait for their leases to expire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from streamrl.config import schema
from streamrl.errors import RewardOutage, TransportError
from streamrl.protocol.transport.types import RunInfo
from streamrl.tasks import run_beside, unless
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.engines.base import Engine, EngineStats
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.deliver import Deliverer
from streamrl.workers.rollout.leases import Held, Leases
from streamrl.workers.rollout.roles import Counts, Tickets
from streamrl.workers.rollout.stall import watch_engine
from streamrl.workers.weights.roles import Weights

log = structlog.get_logger(__name__)

_ROOM_EVERY_S = 0.02  # the engine starts queued samples at its next step
_CONTROL_EVERY_S = 1.0
_RUN_EVERY_S = 1.0
_REWARDS_EVERY_S = 0.1


class Rollout:
    """Implements `workers.rollout.roles.Work`."""

    def __init__(
        self,
        *,
        tickets: Tickets,
        weights: Weights,
        answerer: Answerer,
        config: schema.Config,
        has_other_settings: Callable[[RunInfo], bool],  # whether the run has others than `config`
        progress: Progress,
    ) -> None:
        self.counts = Counts()
        self._tickets = tickets
        self._weights = weights
        self._answerer = answerer
        self._settings = config.worker
        self._has_other_settings = has_other_settings
        self._version_wait_s = config.weights.give_up_after_s
        self._progress = progress
        self._leases = Leases(
            tickets, settings=config.worker, samples_per_ticket=config.sampling.num_samples, progress=progress
        )
        self._deliverer = Deliverer(tickets, self.counts, progress)
        self._engine: Engine | None = None
        self._scored_at_outage = -1  # `num_scored` when rewards were last seen to be out

    @property
    def engine_stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        over = asyncio.Event()
        self._engine = engine
        companions: dict[str, Coroutine[Any, Any, None]] = {
            "follow weights": self._weights.follow(engine),
            "renew leases": self._leases.renew(),
            "watch the run": self._watch_run(stop, over),
            "watch the engine": watch_engine(
                engine, self._progress, facts=self._answerer.facts, stall_s=self._settings.stall_s
            ),
        }
        try:
            await run_beside(self._work(engine, stop, over), companions)
        except TransportError:
            await self._leases.cancel()  # without Redis, nothing can be handed back
            raise
        except BaseException:
            await self._leases.abandon()
            raise
        finally:
            self._engine = None
        await self._leases.abandon()

    async def _work(self, engine: Engine, stop: asyncio.Event, over: asyncio.Event) -> None:
        self._progress.working("generate")
        with self._progress.waiting(Wait.WEIGHTS):
            await unless(over, self._weights.serving(0))
        while not over.is_set():
            control = await self._tickets.control()
            self._progress.note(control=control)
            if control == "pause":
                with self._progress.waiting(Wait.RESUME):
                    await unless(over, asyncio.sleep(_CONTROL_EVERY_S))
                self._leases.reap()
            elif (outage := self._answerer.outage()) is not None:
                await self._sit_out(outage, over)
            else:
                await self._take_for(_CONTROL_EVERY_S, engine, over)
        self._progress.stopping()
        if stop.is_set():  # a run that has ended accepts no more groups, or none of these settings
            await self._leases.wait_for_all(self._settings.grace_s)
        self._leases.reap()

    async def _take_for(self, seconds: float, engine: Engine, over: asyncio.Event) -> None:
        """Keep the engine busy for this long."""
        until = time.monotonic() + seconds
        while not over.is_set() and time.monotonic() < until and self._answerer.outage() is None:
            is_probing = self._answerer.num_scored <= self._scored_at_outage
            if num_to_take := self._leases.num_to_take(engine.stats(), is_probing=is_probing):
                await self._leases.take(num_to_take, partial(self._fulfil, engine=engine))
            # Even with room left: the new tickets must reach the engine before its queue length means anything.
            await self._leases.wait_for_one(_ROOM_EVERY_S)
            self._leases.reap()

    async def _sit_out(self, outage: str, over: asyncio.Event) -> None:
        """Take no tickets while rewards are out; other workers may still reach them."""
        log.warning("rewards_out", reason=outage)
        with self._progress.waiting(Wait.REWARDS):
            while self._answerer.outage() is not None and not over.is_set():
                self._scored_at_outage = self._answerer.num_scored
                await unless(over, asyncio.sleep(_REWARDS_EVERY_S))
                self._leases.reap()

    async def _fulfil(self, held: Held, engine: Engine) -> None:
        ticket = held.leased.ticket
        try:
            async with asyncio.timeout(self._version_wait_s):
                await self._weights.serving(ticket.min_version)
        except TimeoutError:
            log.warning("version_wait_timed_out", ticket=ticket.number, min_version=ticket.min_version)
            await self._leases.hand_back(held)
            return
        try:
            group = await self._answerer.answer(ticket, engine, sample_done=held.sample_done)
        except RewardOutage as outage:
            log.warning("rewards_wait_timed_out", ticket=ticket.number, reason=str(outage))
            self._scored_at_outage = self._answerer.num_scored
            await self._leases.hand_back(held)
            return
        spans = [span for sample in group.samples for span in sample.spans]
        await self._weights.proved(max((span.version for span in spans), default=0))
        await self._deliverer.deliver(held, group)

    async def _watch_run(self, stop: asyncio.Event, over: asyncio.Event) -> None:
        """Set `over` when this worker has nothing left to do. RunGone propagates."""
        while not stop.is_set():
            info = await self._tickets.run_info()
            if info is not None and info.state != "running":
                log.info("run_ended", state=info.state)
                break
            if info is not None and self._has_other_settings(info):
                log.info("run_has_other_settings", term=info.term)
                break
            await unless(stop, asyncio.sleep(_RUN_EVERY_S))
        over.set()
        await asyncio.Event().wait()  # companions must not return
