"""Groups on their way into the stream: those that are ready at about the same time share a call.

    one call is under way ─────────────► outcomes
    what is delivered meanwhile gathers ─────► goes together, in the order in which it came

A round trip costs a worker more than the group itself, and groups are often finished in bursts. There is never more
than one call under way, its repetitions included: so the server needs to remember no more of a worker than the last
one. Blocks as long as the call does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from streamrl.transport.types import Leased

# Of one call. Larger ones gain nothing, and keep the server from its other clients.
_MOST_GROUPS = 64
_MOST_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class Delivery:
    leased: Leased
    header: bytes
    body: bytes


Deliver = Callable[[Sequence[Delivery]], Awaitable[Sequence[bool]]]  # whether each has taken its ticket's place


@dataclass(slots=True)
class _Batch:
    deliveries: list[Delivery] = field(default_factory=list)
    num_bytes: int = 0
    outcomes: asyncio.Task[Sequence[bool]] | None = None

    @property
    def full(self) -> bool:
        return len(self.deliveries) >= _MOST_GROUPS or self.num_bytes >= _MOST_BYTES


class Deliveries:
    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._gathering: _Batch | None = None
        self._turn = asyncio.Lock()

    async def add(self, delivery: Delivery) -> bool:
        """Its outcome, or what its call raised. Who is cancelled here may have delivered all the same."""
        batch = self._gathering
        if batch is None or batch.full:
            batch = self._gathering = _Batch()
        place = len(batch.deliveries)
        batch.deliveries.append(delivery)
        batch.num_bytes += len(delivery.header) + len(delivery.body)
        if batch.outcomes is None:  # begins in the event loop's next turn: all that is ready in this one goes along
            batch.outcomes = asyncio.create_task(self._send(batch), name="deliver groups")
        outcomes = await asyncio.shield(batch.outcomes)
        return outcomes[place]

    async def _send(self, batch: _Batch) -> Sequence[bool]:
        async with self._turn:
            if self._gathering is batch:
                self._gathering = None
            return await self._deliver(batch.deliveries)
