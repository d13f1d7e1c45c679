"""The process that rollouts of a user's environment live in: calls come in by one pipe, answers go out by another, as
those of reward functions do (`workers.rewards.function_child`).

Any number of rollouts, each with an instance of its own and one call at a time; `close` forgets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from streamrl.recipe.environments import ENVIRONMENTS
from streamrl.recipe.own import bind, describe, load_function
from streamrl.workers.rewards.function_child import confine, limit_memory, take_pipes, write_answer

_THREADS = 64  # of environments that wait for something outside


def main() -> None:
    calls, answers = take_pipes()
    setup = json.loads(calls.readline())
    limit_memory(setup["memory_mb"] << 20)
    try:
        confine(own=setup["target"] not in ENVIRONMENTS, network=setup["network"])
        make = bind(load_function(setup["target"], ENVIRONMENTS), setup["options"])
        lacking = [name for name in ("reset", "step") if not callable(getattr(make.func, name, None))]
        if lacking:
            raise TypeError(f"{setup['target']} has no method {' and no '.join(lacking)}")
    except BaseException as error:  # noqa: BLE001 - user code may raise anything while it is imported
        write_answer(answers, {"error": describe(error)})
        return
    write_answer(answers, {"concurrent": True})
    asyncio.run(_serve(make, calls, answers, timeout_s=setup["timeout_s"]))


async def _serve(make: Callable[[], Any], calls: BinaryIO, answers: BinaryIO, *, timeout_s: float) -> None:
    rollouts: dict[int, Any] = {}
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))
    reader = ThreadPoolExecutor(1)  # of its own: environments that hang in all threads must not silence the pipe

    async def answer(number: int, what: str, rollout: int, argument: Any) -> None:
        result: dict[str, Any]
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                if what == "reset":
                    rollouts[rollout] = await asyncio.to_thread(make)
                result = {"value": await _ask(rollouts[rollout], what, argument)}
        except BaseException as error:  # noqa: BLE001 - whatever user code raises fails this rollout, and only it
            result = {"error": f"no answer within {timeout_s:g} s" if limit.expired() else describe(error)}
        write_answer(answers, {"id": number, **result})

    async def forget(rollout: int) -> None:
        instance = rollouts.pop(rollout, None)
        if instance is not None and hasattr(instance, "close"):
            with contextlib.suppress(BaseException):  # nobody waits for it
                await _call(instance.close)

    tasks: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(reader, calls.readline):
        call = json.loads(line)
        what, rollout, argument = call["arguments"]
        work = forget(rollout) if what == "close" else answer(call["id"], what, rollout, argument)
        task = asyncio.create_task(work, name=f"{what} {rollout}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _ask(instance: Any, what: str, argument: Any) -> Any:
    if what == "reset":
        return _text(await _call(instance.reset, argument), "reset()")
    returned = await _call(instance.step, argument)
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(f"step() must return (observation, reward, done), and returned {returned!r:.80}")
    given, reward, done = returned
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__") or not math.isfinite(float(reward)):
        raise TypeError(f"step() must give a finite number as reward, and gave {reward!r:.80}")
    return _text(given, "step()"), float(reward), bool(done)


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.to_thread(method, *arguments)


def _text(value: Any, of: str) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{of} must say a text or nothing, and said {value!r:.80}")
    return value or ""


if __name__ == "__main__":
    main()
