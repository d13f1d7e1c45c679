"""A child process that runs user code (a reward function, an environment, an agent) or a model's programs.

A worker starts a child and calls it, and knows which call is to blame if it dies. Owns the process, under a reaper that
ends all that it starts (`streamrl/reaper.py`), its pipes and the task that reads its answers. Blocks on loading the
code (`LOAD_TIMEOUT_S`) and on answers (`timeout_s`). A late call costs the process its life, since nothing else stops a
function that loops.
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
from streamrl.protocol.wire.ticket import MAX_TOKENS
from streamrl.reaper import reaped

LOAD_TIMEOUT_S = 120.0  # a function's file may import torch
# An `async def` is cancelled inside the child; the child is killed only if that does not help.
CANCEL_GRACE_S = 1.0
_EXIT_WAIT_S = 0.5  # between the end of its pipe and its exit
_KILLED_WAIT_S = 5.0  # for the kernel to reap it; beyond that (a hanging disk, for example) we do not wait
_MAX_ANSWER_BYTES, _MAX_NUMBERS_BYTES = 1 << 20, 32 * MAX_TOKENS  # the latter for one number per token
_OF_FUNCTIONS = "streamrl.workers.confined.function_child"
_SETTINGS = {"target", "options", "of_group", "per_token", "timeout_s", "memory_mb", "network"}
_PASSED = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"}
_PASSED |= {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"}  # not HF_TOKEN
_PASSED |= {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}  # not NVIDIA_API_KEY
_PASSED_FAMILIES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "TORCH", "TOKENIZERS_", "XDG_")

_NO_ANSWER = (ValueError, TypeError, KeyError, RecursionError)  # raised by reading a malformed line


class CallFailed(Exception):
    """A call gave no result; the message says why: the function failed, or could not be loaded."""


class NoProcess(CallFailed):
    """No process, memory or descriptor was to be had, perhaps for a moment."""


class ChildLost(CallFailed):
    """The child died, or was killed because a call was late. `alone`: this call must be the cause."""

    def __init__(self, reason: str, *, alone: bool) -> None:
        super().__init__(reason)
        self.alone = alone


class Child:
    def __init__(self, process: Process, *, description: dict[str, Any], timeout_s: float) -> None:
        self.description = description  # its first line: what the child says about the code it loaded
        self.concurrent = concurrent = description["concurrent"]  # an `async def`: takes many calls at once
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
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
    ) -> Self:
        """Start a child, or raise CallFailed. `door`: a file descriptor through which it sends its listener (see
        `door`). `max_answer_bytes`: a longer line costs the process its life."""
        gives_many = isinstance(source, schema.FunctionReward) and source.per_token
        try:
            process = await asyncio.create_subprocess_exec(
                # It ends with us, since a function that loops never sees its pipe close.
                *reaped([sys.executable, "-m", module]),
                stdin=PIPE,
                stdout=PIPE,
                limit=_MAX_NUMBERS_BYTES if gives_many else max_answer_bytes,
                env=_environment(source.environment),
                start_new_session=True,  # Ctrl-C reaches only the worker
                pass_fds=() if door is None else (door,),
            )
        except OSError as error:
            raise NoProcess(f"no process could be started: {error}") from None
        try:
            _send(process, source.model_dump(include=_SETTINGS) | {"door": door})
            return cls(process, description=await _read_description(process), timeout_s=source.timeout_s)
        except BaseException:
            _kill(process)
            await _await_exit(process)
            raise

    async def call(self, arguments: tuple[Any, ...], *, timeout_s: float | None = None) -> Any:
        """Call user code and return its result, or raise CallFailed. `timeout_s` overrides the source's."""
        if self.lost:
            raise ChildLost("the process is gone", alone=False)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._pending[number] = answer
        limit_s, reported_s = (self._limit_s, self._timeout_s) if timeout_s is None else (timeout_s, timeout_s)
        alarm = loop.call_later(limit_s, self._lose, f"no answer within {reported_s:g} s")
        _send(self._process, {"id": number, "arguments": arguments})
        try:
            return await answer
        except asyncio.CancelledError:
            # Nobody wants the result, but the function would go on and use up the next call's time.
            if not self.concurrent:
                self._lose("the call was cancelled")
            raise
        finally:
            alarm.cancel()
            self._pending.pop(number, None)

    def notify(self, arguments: tuple[Any, ...]) -> None:
        """Send a call without waiting for its answer."""
        if not self.lost:
            _send(self._process, {"id": next(self._numbers), "arguments": arguments})

    async def close(self) -> None:
        self._lose("the pool was closed")
        await self._reader

    def _lose(self, reason: str, *, culprit_known: bool = False) -> None:
        """Kill the process and fail all its calls; only once, since its pid may be reused later."""
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
        except _NO_ANSWER:  # the function wrote to the pipe: nothing in it can be trusted any more
            reason = "the process wrote something that is not an answer"
        else:
            with contextlib.suppress(TimeoutError):  # it may have closed its pipe and still be running
                async with asyncio.timeout(_EXIT_WAIT_S):
                    reason = f"the process ended with status {await self._process.wait()}"
        self._lose(reason)
        await _await_exit(self._process)

    def _settle(self, message: dict[str, Any]) -> None:
        answer = self._pending.get(message["id"])
        if answer is None or answer.done():
            return
        if "error" in message:
            answer.set_exception(CallFailed(_encodable(message["error"])))
            if last := message.get("last"):
                self._lose(str(last), culprit_known=True)
        else:
            answer.set_result(message["value"])


async def _read_description(process: Process) -> dict[str, Any]:
    """Wait for the child's first line and return it: facts about the function. CallFailed if it could not be loaded."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            line = await process.stdout.readline()
        if not line:
            raise CallFailed("the process ended while it loaded the function")
        description: dict[str, Any] = json.loads(line)
        if "error" in description:
            raise CallFailed(_encodable(description["error"]))
        return description | {"concurrent": bool(description["concurrent"])}
    except TimeoutError:
        raise CallFailed(f"not loaded within {LOAD_TIMEOUT_S:g} s") from None
    except _NO_ANSWER:
        raise CallFailed("the process wrote something that is not an answer") from None


def _encodable(error: Any) -> str:
    """Replace lone surrogates, which no message can carry."""
    return str(error).encode(errors="replace").decode()


def _environment(wanted: Collection[str]) -> dict[str, str]:
    """Return the variables that programs need to run and whose names are not those of secrets, plus those wanted."""
    passed = _PASSED | set(wanted)
    return {name: text for name, text in os.environ.items() if name in passed or name.startswith(_PASSED_FAMILIES)}


def _send(process: Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    # No drain: the buffer is bounded by the number of calls that a child may have at once.
    process.stdin.write(json.dumps(message).encode() + b"\n")


def _kill(process: Process) -> None:
    """Have its reaper kill it with all that it has started, and close our pipes, whose other ends these may still
    hold."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)  # user code may have stopped it
    transport = process._transport  # type: ignore[attr-defined]  # asyncio offers no public way to close these pipes
    calls, answers = transport.get_pipe_transport(0), transport.get_pipe_transport(1)
    if not calls.is_closing():
        calls.abort()
    answers.close()


async def _await_exit(process: Process) -> None:
    """Wait until a killed process is gone."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KILLED_WAIT_S):
            await process.wait()
    if process.returncode is None:  # user code has stopped its reaper, or cannot be killed
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
