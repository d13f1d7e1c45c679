"""A worker's view of one child process that runs a reward function: begin it, call it, and know whom its death blames.

Owns the process, its pipes and the task that reads its answers. Waits for the function to be loaded (`LOAD_TIMEOUT_S`)
and for answers (`timeout_s`); a call that is late costs the process, since nothing else stops a function that loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, Self

from streamrl.config import schema

LOAD_TIMEOUT_S = 120.0  # a function's file may import torch
# An `async def` is given up inside the child; the child itself only when it does not even do that.
CANCEL_GRACE_S = 1.0
_EXIT_WAIT_S = 0.5  # between the end of its pipe and the end of a process
_MAX_ANSWER_BYTES = 1 << 16


class CallFailed(Exception):
    """No number came of a call; the text says why. Where it is none of the below, the function gave none."""


class CannotLoad(CallFailed):
    """There is no child: it could not load the function."""


class ChildLost(CallFailed):
    """The child died, or was killed since a call was late. `alone`: no other call can have been the cause."""

    def __init__(self, reason: str, *, alone: bool) -> None:
        super().__init__(reason)
        self.alone = alone


class Child:
    def __init__(self, process: Process, *, concurrent: bool, timeout_s: float) -> None:
        self.concurrent = concurrent  # an `async def`: many calls at once
        self.lost = False
        self._process = process
        self._limit_s = timeout_s + (CANCEL_GRACE_S if concurrent else 0.0)
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[float]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"answers of reward child {process.pid}")

    @classmethod
    async def begin(cls, source: schema.FunctionReward) -> Self:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers.rewards.function_child"),
            stdin=PIPE,
            stdout=PIPE,
            limit=_MAX_ANSWER_BYTES,
            start_new_session=True,  # Ctrl-C is for the worker alone, and what a function forks dies with it
        )
        try:
            _send(
                process,
                {**source.model_dump(include={"target", "options", "timeout_s", "memory_mb"}), "parent": os.getpid()},
            )
            concurrent = await _loaded(process)
        except BaseException:
            _kill(process)
            await process.communicate()  # closes its pipes
            raise
        return cls(process, concurrent=concurrent, timeout_s=source.timeout_s)

    async def call(self, arguments: tuple[Any, ...]) -> float:
        """The function's number, or CallFailed."""
        if self.lost:
            raise ChildLost("the process is gone", alone=False)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[float] = loop.create_future()
        self._pending[number] = answer
        alarm = loop.call_later(self._limit_s, self._lose, f"no answer within {self._timeout_s:g} s")
        _send(self._process, {"id": number, "arguments": arguments})
        try:
            return await answer
        except asyncio.CancelledError:
            # Nobody waits any more, but the function would go on and eat the next call's time.
            if not self.concurrent:
                self._lose("the call was given up")
            raise
        finally:
            alarm.cancel()
            self._pending.pop(number, None)

    async def close(self) -> None:
        self._lose("the pool was closed")
        await self._reader

    def _lose(self, reason: str, *, culprit_known: bool = False) -> None:
        """Kill the process and fail every call in it; once, since later its number may be another process's."""
        if self.lost:
            return
        self.lost = True
        _kill(self._process)
        waiting = [answer for answer in self._pending.values() if not answer.done()]
        for answer in waiting:
            answer.set_exception(ChildLost(reason, alone=len(waiting) == 1 and not culprit_known))

    async def _read(self) -> None:
        assert self._process.stdout is not None
        reason = "the process ended"
        try:
            while line := await self._process.stdout.readline():
                self._settle(json.loads(line))
        except (ValueError, TypeError, KeyError):  # the function wrote on the pipe: nothing in there can be trusted now
            reason = "the process wrote something that is no answer"
        else:
            with contextlib.suppress(TimeoutError):  # it may also have closed its pipe and live on
                async with asyncio.timeout(_EXIT_WAIT_S):
                    reason = f"the process ended with status {await self._process.wait()}"
        self._lose(reason)
        await self._process.communicate()  # closes its pipes

    def _settle(self, message: dict[str, Any]) -> None:
        answer = self._pending.get(message["id"])
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(CallFailed(str(message["error"])))
            if message.get("last"):
                self._lose("the process had used up its memory", culprit_known=True)
        else:
            answer.set_result(float(message["score"]))


async def _loaded(process: Process) -> bool:
    """Wait for the child's first line: CannotLoad, or whether the function is an `async def`."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        raise CannotLoad(f"not loaded within {LOAD_TIMEOUT_S:g} s") from None
    if not line:
        raise CannotLoad("the process ended while it loaded the function")
    first = json.loads(line)
    if "error" in first:
        raise CannotLoad(str(first["error"]))
    return bool(first["concurrent"])


def _send(process: Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    # No drain: what waits in the buffer is bounded by the calls that a child may have at once.
    process.stdin.write(json.dumps(message).encode() + b"\n")


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
