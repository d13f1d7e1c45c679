"""The child process in which rollouts of a user's environment or agent run. Calls arrive on one pipe, answers leave on
another, as for reward functions (`workers.confined.function_child`).

    class       any number of rollouts, each with its own instance and one call at a time; `close` drops it. The worker
                has at most THREADS calls of plain methods here at once, so that none of them waits for a thread
    agent       `rollout` runs it for a session and a row; `end` cancels it and waits until it has ended
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from streamrl.recipe.environments import ENVIRONMENTS
from streamrl.recipe.own import bind, describe, load_function
from streamrl.workers.confined import confine as confining
from streamrl.workers.confined.door import shut_in
from streamrl.workers.confined.function_child import confine, limit_memory, take_pipes, write_answer
from streamrl.workers.environments.base import MAX_GIVEN_CHARS

THREADS = 64  # for environments that block on something outside, and for agents that are plain functions
_MAX_HANGING = THREADS // 2  # beyond that, the process is replaced
_MB_PER_MAKER = 32  # of the memory limit: the stack of a thread counts, and is 8 MB by default
_MAX_REWARDS, _MAX_NAME_CHARS = 8, 64  # named rewards per rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What an agent gets to query the model."""

    base_url: str  # as OpenAI clients expect it, ending in /v1
    api_key: str
    model: str  # the session accepts any name


class Games:
    """Rollouts of a class with `step`."""

    def __init__(self, make: partial[Any], *, memory_mb: int, timeout_s: float) -> None:
        self._make, self._timeout_s = make, timeout_s
        methods = {name: getattr(make.func, name, None) for name in ("reset", "step", "close")}
        is_async = inspect.iscoroutinefunction
        self.in_threads = [name for name, method in methods.items() if method and not is_async(method)]
        self._rollouts: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(THREADS + _MAX_HANGING)
        # Instances of a class whose `reset` is async are made beside its calls, whose number nobody limits.
        makers = max(THREADS, memory_mb // _MB_PER_MAKER)
        self._makers = self._threads if "reset" in self.in_threads else ThreadPoolExecutor(makers)
        self._given_up: list[Future[Any]] = []  # cancelled calls whose threads may still run: nothing can stop them
        self._late: dict[int, Future[Any]] = {}  # by rollout: the last of these
        self._closing: set[asyncio.Task[None]] = set()

    async def answer(self, command: str, rollout: int, argument: Any) -> Any:
        if command == "close":
            instance = self._rollouts.pop(rollout, None)
            if hasattr(instance, "close"):
                closing = asyncio.create_task(self._close(instance, rollout), name=f"close {rollout}")
                self._closing.add(closing)
                closing.add_done_callback(self._closed)
                await asyncio.shield(closing)  # it is closed, however late
            return None
        if command == "reset":
            instance = self._rollouts[rollout] = await self._in_thread(rollout, self._makers, self._make)
            return _text(await self._call(rollout, instance.reset, argument), "reset()")
        returned = await self._call(rollout, self._rollouts[rollout].step, argument)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(f"step() must return (observation, reward, done), not {returned!r:.80}")
        observation, reward, done = returned
        return _text(observation, "step()"), _number(reward, "step()"), bool(done)

    def replacement_reason(self) -> str:
        """Why this process must be replaced; empty if it is fine."""
        self._given_up = [call for call in self._given_up if call.running()]
        return f"{len(self._given_up)} calls hang in the process" if len(self._given_up) >= _MAX_HANGING else ""

    async def _close(self, instance: Any, rollout: int) -> None:
        """Close an instance. A late call still uses it, and nothing can stop that, so it has its time once more; then
        closing what it waits for may be what ends it.
        """
        late = self._late.pop(rollout, None)
        if late is not None and late.running():
            await asyncio.wait([asyncio.wrap_future(late)], timeout=self._timeout_s)
        async with asyncio.timeout(self._timeout_s):
            await self._call(rollout, instance.close)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled():
            closing.exception()  # whoever waited for it has heard of it, or waits no longer

    async def _call(self, rollout: int, method: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await self._in_thread(rollout, self._threads, method, *arguments)

    async def _in_thread(
        self, rollout: int, threads: ThreadPoolExecutor, method: Callable[..., Any], *arguments: Any
    ) -> Any:
        call = threads.submit(method, *arguments)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self._given_up.append(call)
            self._late[rollout] = call
            raise


class Agents:
    """Rollouts of a function, or of a method of the process's single instance."""

    in_threads: Sequence[str] = ()  # the worker counts the threads of these itself

    def __init__(self, function: Callable[..., Any], *, is_async: bool) -> None:
        self._function, self._is_async = function, is_async
        self._rollouts: dict[int, asyncio.Task[Any]] = {}

    async def answer(self, command: str, rollout: int, argument: Any) -> Any:
        if command == "end":
            await self._end(rollout)
            return None
        session = Session(**argument["session"])
        call = self._function(session, argument["row"]) if self._is_async else self._in_thread(session, argument["row"])
        running = self._rollouts[rollout] = asyncio.create_task(call, name=f"rollout {rollout}")
        try:
            return _rewards(await running)
        finally:
            del self._rollouts[rollout]

    def replacement_reason(self) -> str:
        """Never needs a replacement: a thread that is late costs the whole process."""
        return ""

    async def _in_thread(self, session: Session, row: Any) -> Any:
        return await asyncio.shield(asyncio.to_thread(self._function, session, row))

    async def _end(self, rollout: int) -> None:
        """End a rollout. A thread cannot be cancelled: it ends when its session refuses it."""
        running = self._rollouts.get(rollout)
        if running is not None:
            if self._is_async:
                running.cancel()
            await asyncio.wait([running])


def main() -> None:
    calls, answers = take_pipes()
    setup = json.loads(calls.readline())
    limit_memory(setup["memory_mb"] << 20)
    try:
        can_reach_session = _confine(
            own=setup["target"] not in ENVIRONMENTS, network=setup["network"], door=setup["door"]
        )
        found = load_function(setup["target"], ENVIRONMENTS)
        player = getattr(found, "rollout", None) if inspect.isclass(found) else found
        has_agent, is_async = player is not None, inspect.iscoroutinefunction(player)
        handler: Games | Agents
        if has_agent:
            if not can_reach_session:
                raise RuntimeError(
                    "this machine cannot limit an agent to its session (needs seccomp notifications, Linux 5.14); to "
                    "give it the whole network, set environment.network: true"
                )
            handler = Agents(_agent(found, setup["options"]), is_async=is_async)
        else:
            make = _checked(bind(found, setup["options"]), setup["target"])
            handler = Games(make, memory_mb=setup["memory_mb"], timeout_s=setup["timeout_s"])
    except BaseException as error:  # noqa: BLE001 - user code may raise anything while it is imported
        write_answer(answers, {"error": describe(error)})
        return
    facts = {"concurrent": True, "agent": has_agent, "async": is_async, "in_threads": handler.in_threads}
    write_answer(answers, facts)
    # The worker ends an agent that is late.
    asyncio.run(_serve(handler, calls, answers, timeout_s=None if has_agent else setup["timeout_s"]))


def _confine(*, own: bool, network: bool, door: int) -> bool:
    """Confine this process; return whether it can still reach its worker's endpoint."""
    can_reach_session = network

    def forbid(*, network: bool) -> None:
        nonlocal can_reach_session
        try:
            if not network:
                shut_in(door)
                can_reach_session = True
                return
        except OSError:
            pass  # an environment does not need to reach the endpoint
        confining.forbid_calls(network=network)

    confine(own=own, network=network, forbid_calls=forbid)
    return can_reach_session


def _agent(found: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Instantiate a class once, so that all rollouts of this process share what is slow to set up."""
    if inspect.isclass(found):
        return bind(bind(found, options)().rollout, {}, "session", "row")
    return bind(found, options, "session", "row")


def _checked(make: partial[Any], target: str) -> partial[Any]:
    missing = [name for name in ("reset", "step") if not callable(getattr(make.func, name, None))]
    if missing:
        raise TypeError(f"{target} has no method {' and no '.join(missing)}")
    return make


async def _serve(handler: Games | Agents, calls: BinaryIO, answers: BinaryIO, *, timeout_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    reader = ThreadPoolExecutor(1)  # separate: environments that hang in all threads must not block the pipe

    async def answer(number: int, command: str, rollout: int, argument: Any) -> None:
        result: dict[str, Any]
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = {"value": await handler.answer(command, rollout, argument)}
        except BaseException as error:  # noqa: BLE001 - whatever user code raises fails this rollout, and only it
            result = {"error": f"no answer within {timeout_s:g} s" if limit.expired() else describe(error)}
            result |= {"last": replacement_reason} if (replacement_reason := handler.replacement_reason()) else {}
        write_answer(answers, {"id": number, **result})

    tasks: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(reader, calls.readline):
        call = json.loads(line)
        command, rollout, argument = call["arguments"]
        task = asyncio.create_task(answer(call["id"], command, rollout, argument), name=f"{command} {rollout}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _text(value: Any, method: str) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{method} must return a text or None, not {value!r:.80}")
    text = value or ""
    if len(text) > MAX_GIVEN_CHARS:
        raise ValueError(f"{method} may return at most {MAX_GIVEN_CHARS} characters, not {len(text)}")
    text.encode()  # half a character is an error
    return text


def _number(reward: Any, method: str) -> float:
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__") or not math.isfinite(float(reward)):
        raise TypeError(f"{method} must return a finite number as reward, not {reward!r:.80}")
    return float(reward)


def _rewards(returned: Any) -> dict[str, float]:
    """Return the rewards by name; a single one has the empty name."""
    if not isinstance(returned, Mapping):
        return {"": _number(returned, "the agent")}
    if len(returned) > _MAX_REWARDS or not all(map(_is_name, returned)):
        limits = f"at most {_MAX_REWARDS}, named by identifiers of at most {_MAX_NAME_CHARS} characters"
        raise TypeError(f"the agent's rewards must be {limits}, not {returned!r:.80}")
    return {name: _number(reward, "the agent") for name, reward in returned.items()}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and len(name) <= _MAX_NAME_CHARS


if __name__ == "__main__":
    main()
