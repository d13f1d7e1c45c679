"""Deliveries that are ready together go together, at most two calls at a time, and each learns its own outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from streamrl.errors import TransportError
from streamrl.protocol.transport.entries import Deliveries, Delivery
from streamrl.protocol.transport.types import Leased
from tests.helpers import make_ticket


class Server:
    """Notes each call and answers it when told to: False for the tickets that are lost."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.lanes: list[int] = []  # of those calls
        self.under_way: Counter[int] = Counter()  # calls by lane
        self.lost: set[int] = set()
        self.answering = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, lane: int, deliveries: Sequence[Delivery]) -> Sequence[bool]:
        numbers = [delivery.leased.ticket.number for delivery in deliveries]
        self.calls.append(numbers)
        self.lanes.append(lane)
        self.under_way[lane] += 1
        assert self.under_way[lane] == 1, "the receipt of the call before would be gone"
        await self.answering.wait()
        self.under_way[lane] -= 1
        if self.error is not None:
            raise self.error
        return [number not in self.lost for number in numbers]


def delivery(number: int, *, num_bytes: int = 1) -> Delivery:
    leased = Leased(entry_id=f"{number}-0", ticket=make_ticket(number), purpose="train")
    return Delivery(leased, b"header", bytes(num_bytes))


async def add_all(deliveries: Deliveries, numbers: Sequence[int]) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.create_task(deliveries.add(delivery(number))) for number in numbers]
    for _ in range(3):  # turns of the event loop
        await asyncio.sleep(0)
    return tasks


async def test_what_comes_during_a_call_goes_together_with_the_next() -> None:
    server = Server()
    deliveries = Deliveries(server)
    first = await add_all(deliveries, [0])
    later = await add_all(deliveries, [1, 2]) + await add_all(deliveries, [3])
    assert server.calls == [[0]]

    server.lost = {2}
    server.answering.set()
    assert await asyncio.gather(*first, *later) == [True, True, False, True]
    assert server.calls == [[0], [1, 2, 3]]


async def test_what_is_ready_in_the_same_turn_goes_together() -> None:
    server = Server()
    server.answering.set()
    assert await asyncio.gather(*await add_all(Deliveries(server), [0, 1, 2])) == [True] * 3
    assert server.calls == [[0, 1, 2]]


async def test_as_much_as_a_call_takes_goes_beside_the_first_and_a_third_call_waits() -> None:
    server = Server()
    deliveries = Deliveries(server)
    tasks = await add_all(deliveries, [0])
    tasks += await add_all(deliveries, range(1, 64))
    assert server.calls == [[0]]
    tasks += await add_all(deliveries, range(64, 200))
    assert [len(call) for call in server.calls] == [1, 64]
    assert server.lanes == [0, 1]

    server.answering.set()
    assert await asyncio.gather(*tasks) == [True] * 200
    assert [len(call) for call in server.calls] == [1, 64, 64, 64, 7]
    assert [number for call in server.calls for number in call] == list(range(200))


async def test_a_lane_whose_call_is_over_is_used_again() -> None:
    server = Server()
    server.answering.set()
    deliveries = Deliveries(server)
    for number in range(3):
        assert await deliveries.add(delivery(number))
    assert server.lanes == [0, 0, 0]


async def test_a_call_is_bounded_in_groups_and_in_bytes() -> None:
    server = Server()
    server.answering.set()
    deliveries = Deliveries(server)
    await asyncio.gather(*await add_all(deliveries, range(150)))
    assert [len(call) for call in server.calls] == [64, 64, 22]

    server.calls.clear()
    large = [asyncio.create_task(deliveries.add(delivery(number, num_bytes=600_000))) for number in range(5)]
    await asyncio.gather(*large)
    assert server.calls == [[0, 1], [2, 3], [4]]


async def test_an_error_reaches_those_of_its_call_and_nobody_else() -> None:
    server = Server()
    server.error = TransportError("away")
    deliveries = Deliveries(server)
    failing = await add_all(deliveries, [0, 1])
    server.answering.set()
    for task in failing:
        with pytest.raises(TransportError, match="away"):
            await task
    server.error = None
    assert await deliveries.add(delivery(2))


async def test_who_is_cancelled_takes_nobody_along() -> None:
    server = Server()
    deliveries = Deliveries(server)
    one, other = await add_all(deliveries, [0, 1])
    one.cancel()
    server.answering.set()
    assert await other
    assert one.cancelled() or one.cancelling()
    assert server.calls == [[0, 1]]
