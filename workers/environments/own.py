"""The user's environment or agent, in child processes that may loop, exit, raise or eat memory.

    class Guess:
        def __init__(self, *, highest: int = 50): ...                      # from `environment.options`
        def reset(self, row: Mapping[str, Any]) -> str | None: ...         # text before the first turn, if any
        def step(self, completion: str) -> tuple[str | None, float, bool]: # next observation, reward, done
        def close(self) -> None: ...                                       # optional

    async def rollout(session, row) -> float: ...                          # an agent (`agents.py`)

    class Agent:                                                           # one instance per process
        def __init__(self, *, place: str): ...
        async def rollout(self, session, row) -> float: ...

A class with `step` gets one instance per rollout. Its methods may be `async def`; others run in threads of the child,
so a method that waits blocks no other rollout. A call that needs a thread waits here until one is free, and only then
its time begins. A rollout stays with the child that began it, which holds its state: when a child dies, or is killed
because an answer was late, its rollouts are lost. They count as failed samples, and a new child starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from asyncio.subprocess import Process
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError, SampleError
from streamrl.permissions import Permissions
from streamrl.recipe.environments import ENVIRONMENTS
from streamrl.workers.confined.door import Door
from streamrl.workers.environments.base import MAX_ANSWER_BYTES, Answer, Episode, read_answer, read_text
from streamrl.workers.environments.own_child import THREADS
from streamrl.workers.rewards.child import CallFailed, Child, NoProcess
from streamrl.workers.rewards.functions import may_run

_CHILD = "streamrl.workers.environments.own_child"


def build_children(
    settings: schema.Environment, permissions: Permissions, *, longest_wait_s: float | None = None
) -> Children:
    """Check this worker's permission for the target; starts nothing yet. `longest_wait_s`: of a call for a thread, then
    Busy; None: as long as it takes."""
    assert settings.target is not None, "a remote environment has no child processes"
    if settings.target in ENVIRONMENTS:  # a built-in needs no permission to run, but needs one for network access
        permissions = replace(permissions, reward_code=(settings.target,))
    may_run(settings, permissions, section="environment")
    return Children(settings, longest_wait_s=longest_wait_s)


class Busy(CallFailed):
    """No thread was free in time: nothing was called."""


class Children:
    """Assigns rollouts to child processes, and replaces a child that is lost.

    Environments are assigned in turn, since their calls are short. A rollout of an agent is one call, and holds a slot.
    """

    def __init__(self, settings: schema.Environment, *, longest_wait_s: float | None = None) -> None:
        self.has_agent = self.is_async = False
        self.target = settings.target
        self._settings = settings
        self._places = [Place(settings, longest_wait_s=longest_wait_s) for _ in range(settings.processes)]
        self._in_turn = itertools.cycle(self._places)
        self._slots = asyncio.Semaphore(0)  # of all places together; `start` sets how many

    async def start(self) -> None:
        try:
            children = [await place.child() for place in self._places]
        except NoProcess as error:
            raise RewardError(f"environment.target: {error}") from None
        except CallFailed as error:
            raise ConfigError(f"environment.target: cannot use {self._settings.target}: {error}") from None
        self.has_agent, self.is_async = children[0].description["agent"], children[0].description["async"]
        # A plain function holds a thread of its child for the whole rollout.
        self._slots = asyncio.Semaphore(1 << 30 if self.is_async else THREADS * len(self._places))

    async def next(self) -> tuple[Child, int]:
        """Return a live child and a number for the rollout; CallFailed if none can be started."""
        return await next(self._in_turn).next()

    async def take_slot(self) -> Place:
        """Wait for a slot, and return the place with the fewest slots taken, which never exceeds its share: a slot is
        free, so it has a free one."""
        await self._slots.acquire()
        place = min(self._places, key=lambda place: place.num_taken)
        place.num_taken += 1
        return place

    def free_slot(self, place: Place) -> None:
        place.num_taken -= 1
        self._slots.release()

    def reach(self, endpoint: tuple[str, int]) -> None:
        """Let the children reach this endpoint although they have no network."""
        for place in self._places:
            place.reach(endpoint)

    async def close(self) -> None:
        for place in self._places:
            await place.close()


class Place:
    """One child process, and its successor when it is lost."""

    def __init__(self, settings: schema.Environment, *, longest_wait_s: float | None) -> None:
        self.num_taken = 0  # slots
        self._settings, self._longest_wait_s = settings, longest_wait_s
        self._numbers = itertools.count()
        self._child: OwnChild | None = None
        self._door: Door | None = None
        self._endpoint: tuple[str, int] | None = None
        self._start_lock = asyncio.Lock()

    async def next(self) -> tuple[Child, int]:
        """Return the live child and a number for the rollout; CallFailed if it cannot be started."""
        return await self.child(), next(self._numbers)

    async def child(self) -> Child:
        async with self._start_lock:
            if self._child is None or self._child.lost:
                await self.close()
                try:
                    self._door = Door(self._endpoint)
                except OSError as error:
                    raise NoProcess(f"no process could be started: {error}") from None
                try:
                    self._child = await OwnChild.begin(
                        self._settings, _CHILD, door=self._door.theirs.fileno(), max_answer_bytes=MAX_ANSWER_BYTES
                    )
                except BaseException:
                    self._door.close()
                    raise
                self._child.longest_wait_s = self._longest_wait_s
                self._door.theirs.close()
            return self._child

    def reach(self, endpoint: tuple[str, int]) -> None:
        self._endpoint = endpoint
        if self._door is not None:
            self._door.address = endpoint

    async def close(self) -> None:
        if self._child is not None:
            await self._child.close()
        if self._door is not None:
            self._door.close()


class OwnChild(Child):
    """A child with THREADS threads for calls. A call holds its thread until it ends, even if its caller has gone."""

    def __init__(self, process: Process, *, description: dict[str, Any], timeout_s: float) -> None:
        super().__init__(process, description=description, timeout_s=timeout_s)
        self.longest_wait_s: float | None = None
        self._free_threads = asyncio.Semaphore(THREADS)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(self, arguments: tuple[Any, ...], *, timeout_s: float | None = None) -> Any:
        if not self._needs_thread(arguments):
            return await super().call(arguments, timeout_s=timeout_s)
        try:
            # Nobody waits for a close, nor repeats it.
            async with asyncio.timeout(None if arguments[0] == "close" else self.longest_wait_s):
                await self._free_threads.acquire()
        except TimeoutError:
            raise Busy(f"no thread was free within {self.longest_wait_s:g} s") from None
        call = self._in_background(super().call(arguments, timeout_s=timeout_s), arguments)
        call.add_done_callback(lambda _: self._free_threads.release())
        return await asyncio.shield(call)

    def notify(self, arguments: tuple[Any, ...]) -> None:
        if self._needs_thread(arguments):
            self._in_background(self._call_unanswered(arguments), arguments)
        else:
            super().notify(arguments)

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _needs_thread(self, arguments: tuple[Any, ...]) -> bool:
        return arguments[0] in self.description["in_threads"]

    def _in_background(self, work: Coroutine[Any, Any, Any], arguments: tuple[Any, ...]) -> asyncio.Task[Any]:
        command, number, _ = arguments
        task = asyncio.create_task(work, name=f"{command} {number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _call_unanswered(self, arguments: tuple[Any, ...]) -> None:
        with contextlib.suppress(CallFailed):
            await self.call(arguments)


class OwnEnvironment:
    """An environment defined by a user's class."""

    def __init__(self, children: Children) -> None:
        self._children = children

    async def start(self) -> None:
        await self._children.start()
        if self._children.has_agent:
            raise ConfigError(
                f"environment.target = {self._children.target} is an agent: there is no environment to serve, "
                "since workers run agents themselves"
            )

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        try:
            child, number = await self._children.next()
            try:
                opening = read_text(await child.call(("reset", number, dict(row))))
            except Busy:
                raise
            except BaseException:  # the caller has no episode to close, and the child's instance would leak
                child.notify(("close", number, None))
                raise
        except Busy:
            raise
        except (CallFailed, ValueError) as error:
            raise SampleError(f"the environment failed in reset: {error}") from None
        return _OwnEpisode(child, number, opening=opening)

    def outage(self) -> None:
        """Never out: lost child processes are replaced."""

    async def close(self) -> None:
        await self._children.close()


class _OwnEpisode:
    def __init__(self, child: Child, number: int, *, opening: str) -> None:
        self.opening = opening
        self._child, self._number = child, number

    async def step(self, completion: str) -> Answer:
        try:
            observation, reward, done = await self._child.call(("step", self._number, completion))
            return read_answer(observation, reward, done)
        except Busy:
            raise
        except (CallFailed, ValueError, TypeError) as error:  # user code can write anything to the pipe
            raise SampleError(f"the environment failed in step: {error}") from None

    async def close(self) -> None:
        self._child.notify(("close", self._number, None))
