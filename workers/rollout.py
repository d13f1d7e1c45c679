"""The worker's main loop: lease tickets, deliver scored groups.

    lease ─► wait for the ticket's version ─► generate and score its samples ─► wait for proof ─► deliver
      ▲        (one task per ticket, no barrier; `_num_to_take` decides how many)                     │
      └───────────────────────────────────────────────────────────────────────────────────────────────┘
    companion tasks: renew leases; follow weights; watch the engine and the run

Blocks on tickets, on the operator's pause, on the first weights, and on rewards during an outage. If an outage lasts,
tickets waiting for scores are handed back, and the worker tries one ticket at a time until a score arrives. A group is
delivered only after every version that generated one of its tokens has been proved (see `proving`). On exit,
undelivered tickets are handed back, so that nobody has to wait for their leases to expire.

A worker leases as many tickets as keep its engine busy, and no more than it can start soon.

A ticket queued here is one that another worker could already have started, so the queue is kept at about one ticket: a
free slot is filled at once, and N workers share the work by speed, since each leases as it finishes.

    queue longer than one ticket, or KV cache nearly full ─► lease none    running samples still need more cache
    otherwise ─► as many as are in flight, up to the bound                the engine's stats lag behind a new load

The bound counts samples, not tickets. Response lengths are long-tailed: most samples of a ticket finish long before its
last one, and a bound in tickets would leave their slots empty until then (more than half of them, for 8 samples with
geometrically distributed lengths). Nothing waits for a whole batch.
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
from msgspec.structs import replace

from streamrl.config import schema
from streamrl.errors import EngineError, RewardOutage, TransportError, WireError
from streamrl.protocol.transport.types import Leased, RunInfo
from streamrl.protocol.wire.group import Group, encode_group
from streamrl.tasks import cancel_all, run_beside, unless
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.answer import Answerer
from streamrl.workers.engines.base import Engine, EngineStats
from streamrl.workers.roles import Counts, Tickets, Weights

log = structlog.get_logger(__name__)

_LEASE_BLOCK_MS = 500  # short, so that a stop or a pause takes effect soon
_ROOM_EVERY_S = 0.02  # the engine starts queued samples at its next step
_CONTROL_EVERY_S = 1.0
_RUN_EVERY_S = 1.0
_REWARDS_EVERY_S = 0.1
_ALIVE_EVERY_S = 10.0
_SHOW_EVERY_S = 1.0
_KV_FULL = 0.8
_PACE_S = 10.0  # window of the reported tokens per second


@dataclass(slots=True, kw_only=True)
class _Held:
    """A leased ticket in progress."""

    leased: Leased
    num_open: int  # samples not yet generated and scored
    leaving: bool = False  # being delivered or handed back: from now on a missing lease is expected

    def sample_done(self) -> None:
        self.num_open -= 1


class Rollout:
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
        self._samples_per_ticket = config.sampling.num_samples
        self._version_wait_s = config.weights.give_up_after_s
        self._progress = progress
        self._groups: dict[asyncio.Task[None], _Held] = {}
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
            "renew leases": self._renew(),
            "watch the run": self._watch_run(stop, over),
            "watch the engine": self._watch_engine(engine),
        }
        try:
            await run_beside(self._work(engine, stop, over), companions)
        except TransportError:
            await cancel_all(list(self._groups))  # without Redis, nothing can be handed back
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
        if stop.is_set() and self._groups:  # a run that has ended accepts no more groups, or none of these settings
            await asyncio.wait(self._groups, timeout=self._settings.grace_s)
        self._reap()

    async def _take_for(self, seconds: float, engine: Engine, over: asyncio.Event) -> None:
        """Keep the engine busy for this long."""
        until = time.monotonic() + seconds
        while not over.is_set() and time.monotonic() < until and self._answerer.outage() is None:
            if num_to_take := self._num_to_take(engine):
                for leased in await self._lease(num_to_take):
                    held = _Held(leased=leased, num_open=leased.ticket.num_samples)
                    task = asyncio.create_task(self._fulfil(held, engine), name=f"ticket {leased.ticket.number}")
                    self._groups[task] = held
            if self._groups:
                # Even with room left: the new tickets must reach the engine before its queue length means anything.
                await asyncio.wait(self._groups, timeout=_ROOM_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            self._reap()

    def _num_to_take(self, engine: Engine) -> int:
        """Return how many tickets to lease now. The last may partly exceed the bound, so that no slot stays empty."""
        stats, num_at_work, size = engine.stats(), len(self._groups), self._samples_per_ticket
        if self._answerer.num_scored <= self._scored_at_outage:
            return 0 if num_at_work else 1  # no score yet since the outage: probe with one ticket
        if num_at_work and (stats.num_waiting >= size or stats.kv_used >= _KV_FULL):
            return 0
        room = self._settings.max_groups_in_flight * size - sum(held.num_open for held in self._groups.values())
        return max(0, min(-(-room // size), max(1, num_at_work)))

    async def _sit_out(self, outage: str, over: asyncio.Event) -> None:
        """Take no tickets while rewards are out; other workers may still reach them."""
        log.warning("rewards_out", reason=outage)
        with self._progress.waiting(Wait.REWARDS):
            while self._answerer.outage() is not None and not over.is_set():
                self._scored_at_outage = self._answerer.num_scored
                await unless(over, asyncio.sleep(_REWARDS_EVERY_S))
                self._reap()

    async def _lease(self, max_tickets: int) -> list[Leased]:
        with contextlib.nullcontext() if self._groups else self._progress.waiting(Wait.TICKETS):
            return await self._tickets.lease(max_tickets=max_tickets, block_ms=_LEASE_BLOCK_MS)

    def _reap(self) -> None:
        """Drop finished tasks. A task's exception is raised here; its ticket is still leased."""
        for task in [task for task in self._groups if task.done()]:
            if not task.cancelled():
                task.result()
            del self._groups[task]

    async def _abandon(self) -> None:
        """Cancel what is still running and hand its tickets back."""
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
            log.warning("version_wait_timed_out", ticket=ticket.number, min_version=ticket.min_version)
            await self._hand_back(held)
            return
        try:
            group = await self._answerer.answer(ticket, engine, sample_done=held.sample_done)
        except RewardOutage as outage:
            log.warning("rewards_wait_timed_out", ticket=ticket.number, reason=str(outage))
            self._scored_at_outage = self._answerer.num_scored
            await self._hand_back(held)
            return
        spans = [span for sample in group.samples for span in sample.spans]
        await self._weights.proved(max((span.version for span in spans), default=0))
        try:
            header, body = await _encoded(group)
        except WireError as error:  # more than a message can hold: the learner must see it as a failed attempt
            group = _refused(group, error)
            header, body = await _encoded(group)
        held.leaving = True
        if await self._tickets.deliver(leased, header, body):
            self._count(group)
        else:
            self.counts.groups_late += 1
            log.info("group_came_late", ticket=ticket.number)

    async def _hand_back(self, held: _Held) -> None:
        """Return the ticket for another worker; it does not count as a failed attempt."""
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
            lost_entries = {(leased.purpose, leased.entry_id) for leased in lost}
            for task, held in self._groups.items():
                if (held.leased.purpose, held.leased.entry_id) in lost_entries and not held.leaving:
                    log.info("lease_lost", ticket=held.leased.ticket.number)
                    task.cancel()

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
                    **({} if stats.drafts_accepted is None else {"drafts_accepted": round(stats.drafts_accepted, 3)}),
                    tokens_per_s=round(pace.look(stats)),
                    **self._answerer.facts(),
                )
                await asyncio.sleep(min(_SHOW_EVERY_S, self._settings.stall_s / 4))
            await engine.check_alive()


class Pace:
    """Measures tokens per second, and detects a stalled engine: a hung engine may still pass its liveness check.

    Time between two looks counts as half of `stall_s` at most: if it was more, this process was stopped, perhaps with
    its engine. Time in which the engine loads or returns weights does not count: that has limits of its own.
    """

    def __init__(self, stats: EngineStats, *, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._waited_s = 0.0  # since tokens arrived, or none were due
        self._looks = deque([(clock(), stats.num_made)])  # (time, tokens made so far) over the last seconds

    def look(self, stats: EngineStats) -> float:
        """Return recent tokens per second. EngineError if tokens were due for `stall_s` and none came."""
        now = self._clock()
        looked, num_made = self._looks[-1]
        if not stats.is_busy:
            self._waited_s += min(now - looked, self._stall_s / 2)
        if stats.in_flight == 0 or stats.num_made != num_made:
            self._waited_s = 0.0
        elif self._waited_s > self._stall_s:
            raise EngineError(
                f"the engine generated no token for {self._waited_s:.0f} s while {stats.in_flight} samples were in "
                f"flight (worker.stall_s = {self._stall_s:g})"
            )
        self._looks.append((now, stats.num_made))
        while self._looks[0][0] < now - _PACE_S:
            self._looks.popleft()
        began, num_before = self._looks[0]
        return (stats.num_made - num_before) / (now - began) if now > began else 0.0


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
