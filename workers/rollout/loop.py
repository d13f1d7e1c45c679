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
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any

import structlog
from msgspec.structs import replace

from streamrl.config import schema
from streamrl.errors import RewardOutage, TransportError, WireError
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.wire.group import Group, encode_group
from streamrl.tasks import run_beside, unless
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.engines.base import Engine, EngineStats
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.leases import Held, Leases
from streamrl.workers.rollout.roles import Counts, Tickets
from streamrl.workers.rollout.stall import watch_engine
from streamrl.workers.weights.roles import Weights

log = structlog.get_logger(__name__)

_ROOM_EVERY_S = 0.02  # the engine starts queued samples at its next step
_CONTROL_EVERY_S = 1.0
_RUN_EVERY_S = 1.0
_REWARDS_EVERY_S = 0.1
_LATELY = 20  # groups


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
        self._engine: Engine | None = None
        self._scored_at_outage = -1  # `num_scored` when rewards were last seen to be out
        self._failed_lately: deque[bool] = deque(maxlen=_LATELY)  # a past outage must not look like one of now
        progress.note(groups_lately=0, groups_failed_lately=0)

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
        else:
            await self._leases.abandon()
        finally:
            self._engine = None
            self._progress.note(**self._answerer.facts())  # without the rollouts that have ended with it

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
        await self._deliver(held, group)

    async def _deliver(self, held: Held, group: Group) -> None:
        """Deliver a finished group, which ends its ticket, and count what became of it."""
        try:
            header, body = await _encoded(group)
        except WireError as error:  # more than a message can hold: the learner must see it as a failed attempt
            group = _refused(group, error)
            header, body = await _encoded(group)
        held.leaving = True
        if await self._tickets.deliver(held.leased, header, body):
            self._count(group)
        else:
            self.counts.groups_late += 1
            log.info("group_came_late", ticket=held.leased.ticket.number)

    def _count(self, group: Group) -> None:
        self.counts.samples_failed += group.header.num_failed_samples
        if group.header.failed:
            self.counts.groups_failed += 1
            log.warning("ticket_failed", ticket=group.header.ticket, error=group.header.error)
        else:
            self.counts.groups_delivered += 1
        self._failed_lately.append(bool(group.header.failed))
        self._progress.advanced(
            **asdict(self.counts),
            groups_lately=len(self._failed_lately),
            groups_failed_lately=sum(self._failed_lately),
        )

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


def _refused(group: Group, error: WireError) -> Group:
    """Return the failure that takes the place of a group that cannot be sent."""
    num_failed = group.header.num_failed_samples + len(group.samples)
    header = replace(group.header, num_failed_samples=num_failed, error=f"the group cannot be sent: {error}")
    return Group(header=header, prompt_ids=group.prompt_ids)


async def _encoded(group: Group) -> tuple[bytes, bytes]:
    """Encode off the event loop where the group has routes: they are large and compressed, and would block it."""
    if group.prompt_routes is None:
        return encode_group(group)
    return await asyncio.to_thread(encode_group, group)
