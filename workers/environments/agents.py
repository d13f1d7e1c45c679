"""Runs agents: user functions that play a whole rollout, each against its own session.

    async def rollout(session, row) -> float | dict[str, float]:           # may be a plain function, too
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ...

Everything an agent asks of its session belongs to its rollout. The rollout ends when the function returns or raises,
after `rollout_timeout_s`, after `timeout_s` without a request, or when the engine dies. The child process is told to
end a rollout that is no longer needed; if it does not, it is killed with everything that runs in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.protocol.wire.ticket import Ticket
from streamrl.recipe.names import ENVIRONMENT
from streamrl.tasks import cancel_all, run_beside
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.environments.base import read_reward
from streamrl.workers.environments.own import Children, Place
from streamrl.workers.rewards.child import CallFailed, Child, ChildLost
from streamrl.workers.sessions.session import Session
from streamrl.workers.sessions.sessions import Sessions
from streamrl.workers.sessions.trace import Played

MAX_NAMES = 8  # of rewards, over all rollouts: the room that a group has for them beside those of `rewards`
_LOOK_EVERY_S = 0.05  # the shortest interval between checks for a silent agent


class AgentPlayer:
    def __init__(self, children: Children, sessions: Sessions, *, settings: schema.Environment) -> None:
        self._children, self.sessions, self._settings = children, sessions, settings
        self._names: set[str] = set()  # of the rewards of all rollouts so far
        self._ending: set[asyncio.Task[None]] = set()

    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        """Play one rollout. SampleError if the agent fails or makes an invalid request; EngineError propagates."""
        place = await self._children.take_slot()  # before timeouts start
        with contextlib.ExitStack() as slot:
            slot.callback(self._children.free_slot, place)
            return await self._play(ticket, engine, request, place, slot)

    async def _play(
        self, ticket: Ticket, engine: Engine, request: SampleRequest, place: Place, slot: contextlib.ExitStack
    ) -> Played:
        row = {"prompt": ticket.prompt, **ticket.fields}
        async with self.sessions.opened(engine, request, num_samples=ticket.num_samples) as session:
            began = time.monotonic()
            beside = {"what ends it": _fail_with(session), "its silence": self._watch(session)}
            rewards = await run_beside(self._run(session, row, place, slot), beside)
            if session.failure.done():
                session.failure.result()
            if not session.trace.num_turns:
                raise SampleError("the agent sent the model no request: there is nothing to train on")
            played = session.trace.played("length" if session.spent else "stop", sum(rewards.values()))
            return played._replace(
                rewards=self._by_name(rewards),
                model_s=session.model_s,
                environment_s=max(0.0, time.monotonic() - began - session.model_s),
                num_tool_calls=session.num_tool_calls,
            )

    def outage(self) -> None:
        """Never out: lost child processes are replaced."""

    @property
    def num_ending(self) -> int:
        """Abandoned rollouts that may still run in their process."""
        return len(self._ending)

    async def close(self) -> None:
        await cancel_all(list(self._ending))

    async def _run(
        self, session: Session, row: Mapping[str, Any], place: Place, slot: contextlib.ExitStack
    ) -> dict[str, float]:
        argument = {
            "session": {
                "base_url": self.sessions.url_of(session),
                "api_key": session.key,
                "model": session.model.name,
            },
            "row": row,
        }
        limit_s = self._settings.rollout_timeout_s
        try:
            with session.request_in_flight():  # the start of a process does not count as the agent's silence
                child, number = await place.next()
            # A late rollout ends by itself once its session is closed: its process may have healthy ones too.
            async with asyncio.timeout(limit_s), self._end_if_cancelled(child, number, slot):
                at_most_s = limit_s + self._settings.timeout_s
                return _read_rewards(await child.call(("rollout", number, argument), timeout_s=at_most_s))
        except TimeoutError:
            raise SampleError(f"the agent did not end within {limit_s:g} s (environment.rollout_timeout_s)") from None
        except (CallFailed, ValueError) as error:
            if session.spent and session.trace.num_turns and not isinstance(error, ChildLost):
                # It ran into a bound and failed because of that: its part in the mean of each name, as in the sum.
                return {"": 0.0} | dict.fromkeys(self._names, 0.0)
            raise SampleError(session.redacted(f"the agent failed: {error}")) from None

    @contextlib.asynccontextmanager
    async def _end_if_cancelled(self, child: Child, number: int, slot: contextlib.ExitStack) -> AsyncIterator[None]:
        """On cancellation, end the rollout in the child too, in the background; it keeps its slot until then."""
        try:
            yield
        except asyncio.CancelledError:
            ending = asyncio.create_task(self._end(child, number), name=f"end rollout {number}")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            kept = slot.pop_all()
            ending.add_done_callback(lambda _: kept.close())
            raise

    async def _end(self, child: Child, number: int) -> None:
        with contextlib.suppress(CallFailed):
            await child.call(("end", number, None), timeout_s=self._settings.timeout_s)

    async def _watch(self, session: Session) -> None:
        limit_s = self._settings.timeout_s
        while (quiet_s := session.quiet_s) <= limit_s:  # noqa: ASYNC110 - no event says that nothing happened
            await asyncio.sleep(max(_LOOK_EVERY_S, limit_s - quiet_s))
        raise SampleError(f"the agent sent no request for {limit_s:g} s (environment.timeout_s), and did not end")

    def _by_name(self, rewards: Mapping[str, float]) -> dict[str, float]:
        by_name = {name: reward for name, reward in rewards.items() if name}
        if len(self._names | by_name.keys()) > MAX_NAMES:
            raise SampleError(f"the agent used more than {MAX_NAMES} names for rewards over all rollouts")
        self._names |= by_name.keys()
        return {f"{ENVIRONMENT}.{name}": reward for name, reward in by_name.items()}


def _read_rewards(rewards: object) -> dict[str, float]:
    """Read the child's answer. The child has checked it, but user code can write to its pipe too."""
    if not isinstance(rewards, dict):
        raise ValueError(f"the answer {rewards!r:.80} is not a map of rewards")
    return {name: read_reward(reward) for name, reward in rewards.items()}


async def _fail_with(session: Session) -> None:
    await asyncio.shield(session.failure)
