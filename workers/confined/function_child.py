"""The child process in which a reward function runs: calls arrive on one pipe, a JSON line each; answers leave on
another.

It holds no state that matters: its parent kills it when a call takes too long, and starts another. It blocks only on
the next call, and ends with its parent. What the function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.recipe.own import bind, describe, load_function
from streamrl.recipe.rewards import LOADS, REWARDS
from streamrl.terminal import plural
from streamrl.workers.confined import confine as confining
from streamrl.workers.confined.trl_form import SAMPLE_FACTS, bind_of_trl, is_of_trl, rewards_in

_MIN_THREADS, _MAX_THREADS = 4, 32  # of an `async def`: as many as it may have calls
_MB_PER_THREAD = 32  # of the memory limit: the stack of a thread counts as memory, and is 8 MB by default
_NO_NAMES = -3  # EAI_AGAIN: no DNS server can be reached
_NO_NETWORK_HINT = "; a function has network access only if its source sets `network: true`"

# Reads a function's return value for these samples into scores; None: does not apply; a list: one per token
Read = Callable[[Any, list[Any]], list[Any]]


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
        read: Read = _only_number
        if is_of_trl(function) and setup["per_token"]:
            raise TypeError(
                "per_token needs a function of streamrl's form; this one has TRL's, with one reward per sample"
            )
        if is_of_trl(function):
            function, read = bind_of_trl(function, setup["options"]), _numbers_of_trl
        elif setup["of_group"]:
            raise TypeError("of_group needs a function of TRL's form, with a parameter called `completions`")
        else:
            function = _bind(function, setup["options"])
            read = _numbers_of_tokens if setup["per_token"] else read
    except BaseException as error:  # noqa: BLE001 - user code may raise anything while it is imported
        write_answer(answers, {"error": describe(error)})
        return
    write_answer(answers, {"concurrent": asynchronous})
    if asynchronous:
        import asyncio  # lazy: as slow to import as everything else at startup

        threads = max(_MIN_THREADS, min(_MAX_THREADS, setup["memory_mb"] // _MB_PER_THREAD))
        serving = _serve_concurrently(function, read, setup["timeout_s"], calls, answers, threads=threads)
        asyncio.run(serving)
    else:
        _serve(function, read, calls, answers)


def _serve(function: Callable[..., Any], read: Read, calls: BinaryIO, answers: BinaryIO) -> None:
    for line in calls:
        call = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": read(function(*call["arguments"]), call["arguments"][-1])}
        except BaseException as error:  # noqa: BLE001 - whatever user code raises fails this sample, and only it
            answer = _failure(error)
        write_answer(answers, {"id": call["id"], **answer})
        if answer.get("last"):
            return


async def _serve_concurrently(
    function: Callable[..., Any], read: Read, timeout_s: float, calls: BinaryIO, answers: BinaryIO, *, threads: int
) -> None:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def answer(call: dict[str, Any]) -> None:
        result: dict[str, Any]
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = {"value": read(await function(*call["arguments"]), call["arguments"][-1])}
        except BaseException as error:  # noqa: BLE001 - as above
            result = {"error": f"no answer within {timeout_s:g} s"} if limit.expired() else _failure(error)
        write_answer(answers, {"id": call["id"], **result})

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(threads))  # for the function's `asyncio.to_thread`
    reader = ThreadPoolExecutor(1)  # separate: a function that keeps all threads busy must not block the pipe
    tasks: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(reader, calls.readline):
        call = json.loads(line)
        task = asyncio.create_task(answer(call), name=f"call {call['id']}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a callable that takes a prompt, its row's fields, and one sample."""
    wanted = [name for name in SAMPLE_FACTS if name in inspect.signature(function).parameters and name not in options]
    bound = bind(function, {**dict.fromkeys(wanted), **options}, "prompt", "completion", "token_ids", "fields")

    def call(prompt: str, fields: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Any:
        [sample] = samples
        facts = {name: SAMPLE_FACTS[name](sample) for name in wanted}
        return bound(prompt, sample["completion"], sample["token_ids"], fields, **facts)

    return call


def _only_number(value: Any, _: list[Any]) -> list[Any]:
    return [_as_number(value)]


def _numbers_of_tokens(value: Any, samples: list[Any]) -> list[Any]:
    [sample] = samples
    if not hasattr(value, "__len__") or len(value) != len(sample["token_ids"]):
        count = len(sample["token_ids"])
        raise TypeError(
            f"per_token: the function returned {value!r:.80}, not a number for each of {plural(count, 'token')}"
        )
    return [[_as_number(number) for number in value]]


def _as_number(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the function returned {value!r:.80}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the function returned {number}, not a finite number")
    return number


def _numbers_of_trl(returned: Any, samples: list[Any]) -> list[Any]:
    return [None if reward is None else _as_number(reward) for reward in rewards_in(returned, len(samples))]


def _failure(error: BaseException) -> dict[str, Any]:
    """Describe the error. `last`: a process that ran out of memory may have leaked it, so it is replaced."""
    hint = _NO_NETWORK_HINT if _is_network_refusal(error) else ""
    last = {"last": "the process ran out of memory"} if isinstance(error, MemoryError) else {}
    return {"error": describe(error) + hint} | last


def _is_network_refusal(error: BaseException | None) -> bool:
    """Check the error and its causes for a refused network call."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (confining.NO_NETWORK, _NO_NAMES):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_answer(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes out of reach of the function's own reads and prints, and of its subprocesses."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed at any moment
    return calls, answers


def limit_memory(num_bytes: int) -> None:
    """Limit data, not address space: libraries reserve far more than they use. Also let the kernel's OOM killer choose
    this process before the worker, so that a memory hog costs only its own samples."""
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
    """Confine the process before user code runs. Built-ins open no connections, and run even without the guards."""
    with contextlib.suppress(OSError):  # reported by `streamrl doctor`
        keep_apart()
    try:
        forbid_calls(network=network)
    except OSError as error:
        if own and not network:
            reason = f"this machine cannot block a function's network access ({error.strerror})"
            raise RuntimeError(f"{reason}; to allow it, set the source's `network: true`") from None


if __name__ == "__main__":
    main()
