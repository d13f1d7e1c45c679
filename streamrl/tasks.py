"""Groups of asyncio tasks: the first error ends all of them, and is raised unchanged. Servers that lose no connection
when they close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_AGAIN_S = 2.0


async def gather_or_cancel(work: Mapping[str, Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; on the first error the others are cancelled and awaited before it is raised."""
    tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        _raise_first(tasks)
        return [task.result() for task in tasks]
    finally:
        await cancel_all(tasks)


async def run_beside(main: Coroutine[Any, Any, T], companions: Mapping[str, Coroutine[Any, Any, None]]) -> T:
    """Return the result of `main`; companions, which must not return, run until it is done."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(main, name="main")]
    tasks += [asyncio.create_task(coroutine, name=name) for name, coroutine in companions.items()]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        _raise_first(tasks)
        result: T = tasks[0].result()
        return result
    finally:
        await cancel_all(tasks)


async def unless(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of the work; None, with the work cancelled, if `stop` is set first."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait(), name="wait for stop")
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel_all([task, stopping])


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel all tasks, and wait until they have ended.

    Cancels repeatedly: before Python 3.12 `wait_for`, which redis-py uses to send, swallows a cancellation if its
    awaitable completes at the same moment, and a cancelled loop would go on for ever.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def close_server(server: asyncio.Server) -> None:
    """Close the server once its protocols know of every connection that it has accepted, so that they can end them.

    A connection is accepted in one turn of the loop and gets its protocol in the next two. If the server closes between
    them, asyncio of Python 3.11 never closes that connection.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    try:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        server.close()


def _raise_first(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
