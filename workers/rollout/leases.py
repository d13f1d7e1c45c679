"""The tickets that a worker holds, each with the task that fulfils it: leased, renewed, and handed back if left over.

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
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from streamrl.config import schema
from streamrl.protocol.transport.types import Leased
from streamrl.tasks import cancel_all
from streamrl.telemetry.progress import Progress, Wait
from streamrl.workers.engines.base import EngineStats
from streamrl.workers.rollout.roles import Tickets

log = structlog.get_logger(__name__)

_LEASE_BLOCK_MS = 500  # short, so that a stop or a pause takes effect soon
_KV_FULL = 0.8


@dataclass(slots=True, kw_only=True)
class Held:
    """A leased ticket in progress."""

    leased: Leased
    num_open: int  # samples not yet generated and scored
    leaving: bool = False  # being delivered or handed back: from now on a missing lease is expected

    def sample_done(self) -> None:
        self.num_open -= 1


class Leases:
    def __init__(
        self, tickets: Tickets, *, settings: schema.Worker, samples_per_ticket: int, progress: Progress
    ) -> None:
        self._tickets = tickets
        self._settings = settings
        self._samples_per_ticket = samples_per_ticket
        self._progress = progress
        self._held: dict[asyncio.Task[None], Held] = {}

    def num_to_take(self, stats: EngineStats, *, is_probing: bool) -> int:
        """Return how many tickets to lease now. The last may partly exceed the bound, so that no slot stays empty."""
        num_at_work, size = len(self._held), self._samples_per_ticket
        if is_probing:  # no score yet since the outage: probe with one ticket
            return 0 if num_at_work else 1
        if num_at_work and (stats.num_waiting >= size or stats.kv_used >= _KV_FULL):
            return 0
        room = self._settings.max_groups_in_flight * size - sum(held.num_open for held in self._held.values())
        return max(0, min(-(-room // size), max(1, num_at_work)))

    async def take(self, max_tickets: int, fulfil: Callable[[Held], Coroutine[Any, Any, None]]) -> None:
        """Lease up to this many tickets, and start to fulfil each in a task of its own."""
        with contextlib.nullcontext() if self._held else self._progress.waiting(Wait.TICKETS):
            taken = await self._tickets.lease(max_tickets=max_tickets, block_ms=_LEASE_BLOCK_MS)
        for leased in taken:
            held = Held(leased=leased, num_open=leased.ticket.num_samples)
            task = asyncio.create_task(fulfil(held), name=f"ticket {leased.ticket.number}")
            self._held[task] = held

    async def wait_for_one(self, timeout_s: float) -> None:
        """Wait until one of the tickets is done, for this long at most; not at all if there are none."""
        if self._held:
            await asyncio.wait(self._held, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def wait_for_all(self, timeout_s: float) -> None:
        if self._held:
            await asyncio.wait(self._held, timeout=timeout_s)

    def reap(self) -> None:
        """Drop finished tasks. A task's exception is raised here; its ticket is still leased."""
        for task in [task for task in self._held if task.done()]:
            if not task.cancelled():
                task.result()
            del self._held[task]

    async def hand_back(self, held: Held) -> None:
        """Return the ticket for another worker; it does not count as a failed attempt."""
        held.leaving = True
        await self._tickets.hand_back([held.leased])

    async def cancel(self) -> None:
        """Cancel what is still running; its tickets stay leased."""
        await cancel_all(list(self._held))

    async def abandon(self) -> None:
        """Cancel what is still running and hand its tickets back."""
        await self.cancel()
        left = [held.leased for task, held in self._held.items() if task.cancelled() or task.exception() is not None]
        self._held.clear()
        if left:
            log.info("tickets_handed_back", tickets=sorted(leased.ticket.number for leased in left))
            await self._tickets.hand_back(left)

    async def renew(self) -> None:
        """Renew all leases until cancelled, and cancel the task of a ticket whose lease is lost."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 4)
            lost = await self._tickets.renew([held.leased for held in self._held.values() if not held.leaving])
            lost_entries = {(leased.purpose, leased.entry_id) for leased in lost}
            for task, held in self._held.items():
                if (held.leased.purpose, held.leased.entry_id) in lost_entries and not held.leaving:
                    log.info("lease_lost", ticket=held.leased.ticket.number)
                    task.cancel()
