"""A process that runs code of the user's: a reward function, an environment, an agent; or the programs of a model.

A worker begins a child, calls it, and knows whom its death blames. It owns the process, its pipes and the task that
reads its answers. Waits for the code to be loaded (`LOAD_TIMEOUT_S`) and for answers (`timeout_s`); a call that is late
costs the process, since nothing else stops a function that loops.
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
from collections.abc import Collection
from typing import Any, Self

from streamrl.config import schema
from streamrl.process import dying_with_us
from streamrl.protocol.wire.ticket import MAX_TOKENS

LOAD_TIMEOUT_S = 120.0  # a function's file may import torch
# An `async def` is given up inside the child; the child itself only when it does not even do that.
CANCEL_GRACE_S = 1.0
_EXIT_WAIT_S = 0.5  # between the end of its pipe and the end of a process
_KILLED_WAIT_S = 5.0  # for the kernel to be done with it; who waits for a disk that hangs is left to it
_MAX_ANSWER_BYTES, _MAX_NUMBERS_BYTES = 1 << 20, 32 * MAX_TOKENS  # the latter with a number for each token
_OF_FUNCTIONS = "streamrl.workers.confined.function_child"
_SETTINGS = {"target", "options", "of_group", "per_token", "timeout_s", "rollout_timeout_s", "memory_mb", "network"}
_PASSED = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}
_PASSED |= {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"}  # not HF_TOKEN
_PASSED_FAMILIES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "TORCH", "TOKENIZERS_", "XDG_")

_NO_ANSWER = (ValueError, TypeError, KeyError, RecursionError)  # what comes of reading a line that is none


class CallFailed(Exception):
    """No number came of a call; the text says why: the function gave none, or could not be loaded."""


class ChildLost(CallFailed):
    """The child died, or was killed since a call was late. `alone`: no other call can have been the cause."""

    def __init__(self, reason: str, *, alone: bool) -> None:
        super().__init__(reason)
        self.alone = alone


class Child:
    def __init__(self, process: Process, *, told: dict[str, Any], timeout_s: float) -> None:
        self.told = told  # by its first line
        self.concurrent = concurrent = told["concurrent"]  # an `async def`: many calls at once
        self.lost = False
        self._process = process
        self._limit_s = timeout_s + (CANCEL_GRACE_S if concurrent else 0.0)
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"answers of child {process.pid}")

    @classmethod
    async def begin(
        cls,
        source: schema.FunctionReward | schema.CodeReward | schema.Environment,
        module: str = _OF_FUNCTIONS,
        *,
        door: int | None = None,
    ) -> Self:
        """`door`: a file that it is given, to send its listener through (see `door`)."""
        gives_many = isinstance(source, schema.FunctionReward) and source.per_token
        process = await asyncio.create_subprocess_exec(
            # By the kernel, since a function that loops never sees its pipe close.
            *dying_with_us([sys.executable, "-m", module], by=signal.SIGKILL),
            stdin=PIPE,
            stdout=PIPE,
            limit=_MAX_NUMBERS_BYTES if gives_many else _MAX_ANSWER_BYTES,
            env=_environment(source.environment),
            start_new_session=True,  # Ctrl-C is for the worker alone, and what a function forks dies with it
            pass_fds=() if door is None else (door,),
        )
        try:
            _send(process, source.model_dump(include=_SETTINGS) | {"door": door})
            return cls(process, told=await _loaded(process), timeout_s=source.timeout_s)
        except BaseException:
            _kill(process)
            await _gone(process)
            raise

    async def call(self, arguments: tuple[Any, ...], *, timeout_s: float | None = None) -> Any:
        """What user code made of it; or CallFailed. `timeout_s`: another than the source's."""
        if self.lost:
            raise ChildLost("the process is gone", alone=False)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._pending[number] = answer
        limit_s, told_s = (self._limit_s, self._timeout_s) if timeout_s is None else (timeout_s, timeout_s)
        alarm = loop.call_later(limit_s, self._lose, f"no answer within {told_s:g} s")
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

    def tell(self, arguments: tuple[Any, ...]) -> None:
        """Without waiting for an answer."""
        if not self.lost:
            _send(self._process, {"id": next(self._numbers), "arguments": arguments})

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
        except _NO_ANSWER:  # the function wrote on the pipe: nothing in there can be trusted now
            reason = "the process wrote something that is no answer"
        else:
            with contextlib.suppress(TimeoutError):  # it may also have closed its pipe and live on
                async with asyncio.timeout(_EXIT_WAIT_S):
                    reason = f"the process ended with status {await self._process.wait()}"
        self._lose(reason)
        await _gone(self._process)

    def _settle(self, message: dict[str, Any]) -> None:
        answer = self._pending.get(message["id"])
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(CallFailed(_words_of(message["error"])))
            if last := message.get("last"):
                self._lose(str(last), culprit_known=True)
        else:
            answer.set_result(message["value"])


async def _loaded(process: Process) -> dict[str, Any]:
    """Wait for the child's first line: CallFailed, or what it tells of the function."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise CallFailed("the process ended while it loaded the function")
        first: dict[str, Any] = json.loads(line)
        if "error" in first:
            raise CallFailed(_words_of(first["error"]))
        return first | {"concurrent": bool(first["concurrent"])}
    except TimeoutError:
        raise CallFailed(f"not loaded within {LOAD_TIMEOUT_S:g} s") from None
    except _NO_ANSWER:
        raise CallFailed("the process wrote something that is no answer") from None


def _words_of(error: Any) -> str:
    """Half a character goes into no message."""
    return str(error).encode(errors="replace").decode()


def _environment(wanted: Collection[str]) -> dict[str, str]:
    """What programs need to run, and no secret is called; and what is asked for by name."""
    passed = _PASSED | set(wanted)
    return {name: text for name, text in os.environ.items() if name in passed or name.startswith(_PASSED_FAMILIES)}


def _send(process: Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    # No drain: what waits in the buffer is bounded by the calls that a child may have at once.
    process.stdin.write(json.dumps(message).encode() + b"\n")


def _kill(process: Process) -> None:
    """And let go of its pipes: what it has forked away, out of this signal's reach, may hold their other ends."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    transport = process._transport  # type: ignore[attr-defined]  # asyncio closes no pipe of a process that it hands out
    calls, answers = transport.get_pipe_transport(0), transport.get_pipe_transport(1)
    if not calls.is_closing():
        calls.abort()
    answers.close()


async def _gone(process: Process) -> None:
    """Of one that was killed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILLED_WAIT_S):
            await process.wait()
