"""The process that a reward function runs in: calls come in by one pipe, a JSON line each, answers go out by another.

It owns nothing that matters: its parent kills it when a call takes too long and begins another. It waits only for the
next call, and ends with its parent. What the function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.recipe.own import bind, describe, load_function
from streamrl.recipe.rewards import LOADS, REWARDS
from streamrl.workers.rewards import confine as confining
from streamrl.workers.rewards.trl_form import bind_of_trl, is_of_trl, only_reward

_NO_NAMES = -3  # EAI_AGAIN: no server of names can be asked
_NO_NETWORK_HINT = "; a function has a network only where its source says `network: true`"

Read = Callable[[Any], float | None]  # the score in what a function returned; None: it does not apply


def main() -> None:
    calls, answers = take_pipes()
    setup = json.loads(calls.readline())
    limit_memory(setup["memory_mb"] << 20)
    try:
        confine(own=setup["target"] not in REWARDS, network=setup["network"])
        function = load_function(setup["target"], REWARDS)
        if setup["target"] in LOADS:
            LOADS[setup["target"]]()
        asynchronous = inspect.iscoroutinefunction(function)
        read: Read = _as_number
        if is_of_trl(function):
            function, read = bind_of_trl(function, setup["options"]), _read_of_trl
        else:
            function = bind(function, setup["options"], "prompt", "completion", "token_ids", "fields")
    except BaseException as error:  # noqa: BLE001 - user code may raise anything while it is imported
        write_answer(answers, {"error": describe(error)})
        return
    write_answer(answers, {"concurrent": asynchronous})
    if asynchronous:
        import asyncio  # costs as much time as all the rest of the start

        asyncio.run(_serve_concurrently(function, read, setup["timeout_s"], calls, answers))
    else:
        _serve(function, read, calls, answers)


def _serve(function: Callable[..., Any], read: Read, calls: BinaryIO, answers: BinaryIO) -> None:
    for line in calls:
        call = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": read(function(*call["arguments"]))}
        except BaseException as error:  # noqa: BLE001 - whatever user code raises fails this sample, and only it
            answer = _failure(error)
        write_answer(answers, {"id": call["id"], **answer})
        if answer.get("last"):
            return


async def _serve_concurrently(
    function: Callable[..., Any], read: Read, timeout_s: float, calls: BinaryIO, answers: BinaryIO
) -> None:
    import asyncio

    async def answer(call: dict[str, Any]) -> None:
        result: dict[str, Any]
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = {"value": read(await function(*call["arguments"]))}
        except BaseException as error:  # noqa: BLE001 - as above
            result = {"error": f"no answer within {timeout_s:g} s"} if limit.expired() else _failure(error)
        write_answer(answers, {"id": call["id"], **result})

    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(None, calls.readline):
        call = json.loads(line)
        task = asyncio.create_task(answer(call), name=f"call {call['id']}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _as_number(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the function returned {value!r:.80}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the function returned {number}, not a finite number")
    return number


def _read_of_trl(returned: Any) -> float | None:
    reward = only_reward(returned)
    return None if reward is None else _as_number(reward)


def _failure(error: BaseException) -> dict[str, Any]:
    """`last`: who has eaten all its memory may have leaked it, so its place begins another process."""
    hint = _NO_NETWORK_HINT if _wanted_network(error) else ""
    last = {"last": "the process had used up its memory"} if isinstance(error, MemoryError) else {}
    return {"error": describe(error) + hint} | last


def _wanted_network(error: BaseException | None) -> bool:
    """By the error, or by those that it came of."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (confining.NO_NETWORK, _NO_NAMES):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_answer(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to where the function's own reads and prints cannot reach them, nor its subprocesses."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # said at once: it may be killed any moment
    return calls, answers


def limit_memory(num_bytes: int) -> None:
    """Of data, not of addresses: libraries reserve far more than they ever use. And where memory is short, the kernel
    ends this process before the worker: code that eats it costs its samples and no more."""
    with contextlib.suppress(OSError):  # a container may hide the file
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def confine(
    *,
    own: bool,
    network: bool,
    keep_apart: Callable[[], None] = confining.keep_apart,
    forbid_calls: Callable[..., None] = confining.forbid_calls,
) -> None:
    """Before any code of the user's. What is built in opens no connections, and runs where the kernel has no guard."""
    with contextlib.suppress(OSError):  # `streamrl doctor` says so
        keep_apart()
    try:
        forbid_calls(network=network)
    except OSError as error:
        if own and not network:
            reason = f"this machine cannot keep a function from the network ({error.strerror})"
            raise RuntimeError(f"{reason}; if it may have one, set the source's `network: true`") from None


if __name__ == "__main__":
    main()
