"""Groups on their way into the stream: those that are ready at about the same time share a call.

    one call is under way ─────────────────────────────► outcomes
    what is delivered meanwhile gathers ───────────────────► goes together, in the order in which it came
                                     └ already as much as one call takes ─► goes at once, beside the first

A round trip costs a worker more than the group itself, and groups are often finished in bursts. Each call goes in a
lane, and each lane has one call under way at most, its repetitions included: so the server needs to remember no more
of a worker than the last one of each lane. Blocks as long as the call does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from streamrl.protocol.transport.types import Leased

_NUM_LANES = 2  # so that one call is written while the server works on the other
# Of one call. Larger ones gain nothing, and keep the server from its other clients.
_MOST_GROUPS = 64
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Delivery:
    leased: Leased
    header: bytes
    body: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.body)


Deliver = Callable[[int, Sequence[Delivery]], Awaitable[Sequence[bool]]]  # in a lane: whether each took its place


class Deliveries:
    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._waiting: deque[tuple[Delivery, asyncio.Future[bool]]] = deque()
        self._num_bytes = 0  # of those
        self._lanes: dict[int, asyncio.Task[None]] = {}  # in which something is under way

    async def add(self, delivery: Delivery) -> bool:
        """Its outcome, or what its call raised. Who is cancelled here may have delivered all the same."""
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, outcome))
        self._num_bytes += delivery.num_bytes
        if not self._lanes or (self._enough_for_a_call and len(self._lanes) < _NUM_LANES):
            lane = next(lane for lane in range(_NUM_LANES) if lane not in self._lanes)
            # It begins in the event loop's next turn: all that is ready in this one goes along.
            self._lanes[lane] = asyncio.create_task(self._drain(lane), name=f"deliver groups {lane}")
        return await outcome

    @property
    def _enough_for_a_call(self) -> bool:
        return len(self._waiting) >= _MOST_GROUPS or self._num_bytes >= _MOST_BYTES

    async def _drain(self, lane: int) -> None:
        """One call after the other, while anything waits."""
        try:
            while self._waiting:
                await self._send(lane, self._take())
        finally:
            del self._lanes[lane]

    def _take(self) -> list[tuple[Delivery, asyncio.Future[bool]]]:
        taken: list[tuple[Delivery, asyncio.Future[bool]]] = []
        num_bytes = 0
        while self._waiting and len(taken) < _MOST_GROUPS and num_bytes < _MOST_BYTES:
            taken.append(self._waiting.popleft())
            num_bytes += taken[-1][0].num_bytes
        self._num_bytes -= num_bytes
        return taken

    async def _send(self, lane: int, batch: Sequence[tuple[Delivery, asyncio.Future[bool]]]) -> None:
        try:
            outcomes = await self._deliver(lane, [delivery for delivery, _ in batch])
        except BaseException as error:  # whatever it is: who waits for this call would else do so for ever
            for _, waiter in batch:
                if not waiter.done():  # nobody waits where it was cancelled
                    waiter.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, waiter), outcome in zip(batch, outcomes, strict=True):
                if not waiter.done():
                    waiter.set_result(outcome)
