"""Tickets that a worker has leased, as tests look at them."""

from __future__ import annotations

from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from tests.helpers import wait_until_async


def numbers(leased: list[Leased]) -> list[int]:
    return [one.ticket.number for one in leased]


async def all_of(worker: WorkerStream, count: int, *, block_ms: int = 50) -> list[Leased]:
    """Lease until so many tickets came."""
    got: list[Leased] = []

    async def enough() -> bool:
        got.extend(await worker.lease(max_tickets=count - len(got), block_ms=block_ms))
        return len(got) >= count

    await wait_until_async(enough, description=f"{count} tickets leased")
    return got
