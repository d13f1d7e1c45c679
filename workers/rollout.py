"""The worker's loop: tickets in, scored groups out.

    lease ─► wait for the ticket's version ─► its samples, each generated and scored ─► wait for proof ─► deliver
      ▲        (one task a ticket, no barrier; as many as `_num_to_take` says)                               │
      └──────────────────────────────────────────────────────────────────────────────────────────────────────┘
    beside it: leases renewed; weights followed; the engine and the run looked after

Blocks on tickets, on the operator's pause, on the first weights, and on rewards while nobody can score. Where that
lasts, tickets that wait for their scores are handed back, and one at a time is tried until a score comes. A group
leaves only when every version that made a token of it was proved (see `proving`). What is not delivered in the end is
handed back, so that nobody waits for a lease to run out.

A worker takes as many tickets as keep its engine busy, and no more than it can soon begin.

What lies in a worker's queue is what another worker could have begun already, so the queue is kept at about one ticket:
a place that falls free is filled at once, and N workers share the work by speed, since each takes as it finishes.

    queue longer than a ticket, or cache nearly full ─► none          what runs still needs more of the cache
    else ─► as many again as are at work, up to the bound             the first look at a new load is a guess

The bound is in samples. Answers are long-tailed: of a ticket's samples most are done long before the last one, and if
tickets were counted, the places of those that are done would stay empty until then (of 8 samples with geometric lengths
more than half). Nothing waits for a whole batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from streamrl.config import schema
from streamrl.errors import EngineError, RewardOutage, TransportError
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.wire.group import Group, encode_group
from streamrl.tasks import cancel_all, run_beside, unless
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.answer import Answerer
from streamrl.workers.engines.base import Engine, EngineStats
from streamrl.workers.roles import Counts, Tickets, Weights

log = structlog.get_logger(__name__)

_LEASE_BLOCK_MS = 500  # so that a word to stop or to pause is heard soon
_ROOM_EVERY_S = 0.02  # the engine begins what was queued with its next step
_CONTROL_EVERY_S = 1.0
_RUN_EVERY_S = 1.0
_REWARDS_EVERY_S = 0.1
_ALIVE_EVERY_S = 10.0
_SHOW_EVERY_S = 1.0
_KV_FULL = 0.8
_PACE_S = 10.0  # over which it is told


@dataclass(slots=True, kw_only=True)
class _Held:
    """A ticket at work."""

    leased: Leased
    num_open: int  # samples that are not made and scored yet
    leaving: bool = False  # from here on the ticket goes because we deliver it, or hand it back

    def sample_done(self) -> None:
        self.num_open -= 1


class Rollout:
    def __init__(
        self, *, tickets: Tickets, weights: Weights, answerer: Answerer, config: schema.Config, progress: Progress
    ) -> None:
        self.counts = Counts()
        self._tickets = tickets
        self._weights = weights
        self._answerer = answerer
        self._settings = config.worker
        self._samples_per_ticket = config.sampling.num_samples
        self._version_wait_s = config.weights.give_up_after_s
        self._progress = progress
        self._groups: dict[asyncio.Task[None], _Held] = {}
        self._engine: Engine | None = None
        self._scored_at_outage = -1  # what was scored when rewards were last seen to be out

    @property
    def engine_stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats()

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        over = asyncio.Event()
        self._engine = engine
        companions: dict[str, Coroutine[Any, Any, None]] = {
            "follow weights": self._weights.follow(engine),
            "renew leases": self._renew(),
            "watch the run": self._watch_run(stop, over),
            "watch the engine": self._watch_engine(engine),
        }
        try:
            await run_beside(self._work(engine, stop, over), companions)
        except TransportError:
            await cancel_all(list(self._groups))  # who cannot reach Redis cannot hand back either
            raise
        except BaseException:
            await self._abandon()
            raise
        finally:
            self._engine = None
        await self._abandon()

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
                self._reap()
            elif (outage := self._answerer.outage()) is not None:
                await self._sit_out(outage, over)
            else:
                await self._take_for(_CONTROL_EVERY_S, engine, over)
        self._progress.stopping()
        if stop.is_set() and self._groups:  # a run that has ended wants no more groups
            await asyncio.wait(self._groups, timeout=self._settings.grace_s)
        self._reap()

    async def _take_for(self, seconds: float, engine: Engine, over: asyncio.Event) -> None:
        """Keep the hands full for a while."""
        until = time.monotonic() + seconds
        while not over.is_set() and time.monotonic() < until and self._answerer.outage() is None:
            if most := self._num_to_take(engine):
                for leased in await self._lease(most):
                    held = _Held(leased=leased, num_open=leased.ticket.num_samples)
                    task = asyncio.create_task(self._fulfil(held, engine), name=f"ticket {leased.ticket.number}")
                    self._groups[task] = held
            if self._groups:
                # Even with room left: what was taken just now must reach the engine before its queue says anything.
                await asyncio.wait(self._groups, timeout=_ROOM_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            self._reap()

    def _num_to_take(self, engine: Engine) -> int:
        """The last ticket may go beyond the bound in part, so that no place waits."""
        stats, num_at_work, size = engine.stats(), len(self._groups), self._samples_per_ticket
        if self._answerer.num_scored <= self._scored_at_outage:
            return 0 if num_at_work else 1  # nobody has seen yet that rewards are back: one ticket finds out
        if num_at_work and (stats.num_waiting >= size or stats.kv_used >= _KV_FULL):
            return 0
        room = self._settings.max_groups_in_flight * size - sum(held.num_open for held in self._groups.values())
        return max(0, min(-(-room // size), max(1, num_at_work)))

    async def _sit_out(self, outage: str, over: asyncio.Event) -> None:
        """Take no tickets while their samples could not be scored; others may have a way to the rewards."""
        log.warning("rewards_out", reason=outage)
        with self._progress.waiting(Wait.REWARDS):
            while self._answerer.outage() is not None and not over.is_set():
                self._scored_at_outage = self._answerer.num_scored
                await unless(over, asyncio.sleep(_REWARDS_EVERY_S))
                self._reap()

    async def _lease(self, most: int) -> list[Leased]:
        with contextlib.nullcontext() if self._groups else self._progress.waiting(Wait.TICKETS):
            return await self._tickets.lease(max_tickets=most, block_ms=_LEASE_BLOCK_MS)

    def _reap(self) -> None:
        """Forget tasks that ended; what one of them raised comes out here, and its ticket is still held."""
        for task in [task for task in self._groups if task.done()]:
            if not task.cancelled():
                task.result()
            del self._groups[task]

    async def _abandon(self) -> None:
        """Hand back what is still at work."""
        await cancel_all(list(self._groups))
        left = [held.leased for task, held in self._groups.items() if task.cancelled() or task.exception() is not None]
        self._groups.clear()
        if left:
            log.info("tickets_handed_back", tickets=sorted(leased.ticket.number for leased in left))
            await self._tickets.hand_back(left)

    async def _fulfil(self, held: _Held, engine: Engine) -> None:
        leased, ticket = held.leased, held.leased.ticket
        try:
            async with asyncio.timeout(self._version_wait_s):
                await self._weights.serving(ticket.min_version)
        except TimeoutError:
            log.warning("version_awaited_in_vain", ticket=ticket.number, min_version=ticket.min_version)
            await self._hand_back(held)
            return
        try:
            group = await self._answerer.answer(ticket, engine, sample_done=held.sample_done)
        except RewardOutage as outage:
            log.warning("rewards_awaited_in_vain", ticket=ticket.number, reason=str(outage))
            self._scored_at_outage = self._answerer.num_scored
            await self._hand_back(held)
            return
        spans = [span for sample in group.samples for span in sample.spans]
        await self._weights.proved(max((span.version for span in spans), default=0))
        header, body = await _encoded(group)
        held.leaving = True
        if await self._tickets.deliver(leased, header, body):
            self._count(group)
        else:
            self.counts.groups_late += 1
            log.info("group_came_late", ticket=ticket.number)

    async def _hand_back(self, held: _Held) -> None:
        """Others may do better; nobody counts it as a failure."""
        held.leaving = True
        await self._tickets.hand_back([held.leased])

    def _count(self, group: Group) -> None:
        self.counts.samples_failed += group.header.num_failed_samples
        if group.header.failed:
            self.counts.groups_failed += 1
            log.warning("ticket_failed", ticket=group.header.ticket, error=group.header.error)
        else:
            self.counts.groups_delivered += 1
        self._progress.advanced(**asdict(self.counts))

    # Beside the loop

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 4)
            lost = await self._tickets.renew([held.leased for held in self._groups.values() if not held.leaving])
            gone = {(leased.purpose, leased.entry_id) for leased in lost}
            for task, held in self._groups.items():
                if (held.leased.purpose, held.leased.entry_id) in gone and not held.leaving:
                    log.info("lease_lost", ticket=held.leased.ticket.number)
                    task.cancel()

    async def _watch_run(self, stop: asyncio.Event, over: asyncio.Event) -> None:
        """Sets `over` when there is nothing left to do here. RunGone passes through."""
        while not stop.is_set():
            info = await self._tickets.run_info()
            if info is not None and info.state != "running":
                log.info("run_ended", state=info.state)
                break
            await unless(stop, asyncio.sleep(_RUN_EVERY_S))
        over.set()
        await asyncio.Event().wait()  # a companion does not end by itself

    async def _watch_engine(self, engine: Engine) -> None:
        pace = Pace(engine.stats(), stall_s=self._settings.stall_s)
        while True:
            until = time.monotonic() + _ALIVE_EVERY_S
            while time.monotonic() < until:
                stats = engine.stats()
                self._progress.note(
                    in_flight=stats.in_flight,
                    waiting=stats.num_waiting,
                    kv_used=round(stats.kv_used, 3),
                    tokens_per_s=round(pace.look(stats)),
                    **self._answerer.facts(),
                )
                await asyncio.sleep(min(_SHOW_EVERY_S, self._settings.stall_s / 4))
            await engine.check_alive()


class Pace:
    """How fast an engine makes tokens, and that it makes any: one that hangs may answer all the same when asked."""

    def __init__(self, stats: EngineStats, *, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._since = clock()  # when tokens had come, or were not due
        self._looks = deque([(self._since, stats.num_made)])  # of the last seconds: (when, tokens made by then)

    def look(self, stats: EngineStats) -> float:
        """Tokens a second, over the last seconds. EngineError: they were due for longer than the limit; none came."""
        now = self._clock()
        if stats.in_flight == 0 or stats.num_made != self._looks[-1][1]:
            self._since = now
        elif now - self._since > self._stall_s:
            raise EngineError(
                f"the engine made no token for {now - self._since:.0f} s while {stats.in_flight} samples were in "
                f"flight (worker.stall_s = {self._stall_s:g})"
            )
        self._looks.append((now, stats.num_made))
        while self._looks[0][0] < now - _PACE_S:
            self._looks.popleft()
        began, before = self._looks[0]
        return (stats.num_made - before) / (now - began) if now > began else 0.0


async def _encoded(group: Group) -> tuple[bytes, bytes]:
    """Routes are many, and compressed: other samples are not to wait for that."""
    if group.prompt_routes is None:
        return encode_group(group)
    return await asyncio.to_thread(encode_group, group)
