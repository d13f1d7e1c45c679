"""The interface between a worker and the environment its model plays against.

    begin (a row) ──► Episode ──► step (the model's text) ──► the environment's text, a reward ──► ... ──► close

An environment deals in text only: it knows nothing of tokens, versions or tickets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.errors import SampleError

MAX_GIVEN_CHARS = 1 << 20  # of one answer
# Of an answer as JSON, which may write a character beyond U+FFFF as two escapes of 6 bytes each.
MAX_ANSWER_BYTES = 12 * MAX_GIVEN_CHARS + (1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The environment's answer to one turn."""

    observation: str = ""  # what the model reads before its next turn
    reward: float = 0.0  # of this turn; the rollout's reward is the sum
    done: bool = False


def read_answer(observation: object, reward: object, done: object) -> Answer:
    """Check an answer from another process. ValueError if the model or the learner could not use it."""
    if not isinstance(done, bool):
        raise ValueError(f"the answer has 'done' = {done!r:.80}, which is not a boolean")
    return Answer(observation=read_text(observation), reward=read_reward(reward), done=done)


def read_reward(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"the answer has 'reward' = {value!r:.80}, which is not a finite number")
    return float(value)


def read_text(value: object, name: str = "observation") -> str:
    """Check a text; None counts as empty. ValueError if it is not a string or has a lone surrogate."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"the answer has {name!r} = {value!r:.80}, which is not a string")
    if len(value) > MAX_GIVEN_CHARS:
        raise ValueError(f"the answer's {name!r} has {len(value)} characters; at most {MAX_GIVEN_CHARS} are allowed")
    value.encode()
    return value


def check_opening(opening: str, *, is_chat: bool) -> None:
    """SampleError if the text before the first turn has no place in the prompt."""
    if opening and is_chat:
        raise SampleError("reset() must return None if prompts are messages: put the opening into the row")


def check_given(given: Sized) -> None:
    """SampleError if there is nothing, as text or as tokens, that the model reads before its next turn."""
    if not given:
        raise SampleError("step() returned no observation, but is not done: the model has nothing to answer")


class Episode(Protocol):
    """One rollout. A SampleError from any call loses this rollout only."""

    opening: str  # the environment's text before the first turn, appended to the prompt

    async def step(self, completion: str) -> Answer: ...

    async def close(self) -> None:
        """Close it in whatever state it is; never raises."""


class Environment(Protocol):
    """Where rollouts are begun; many may run at once."""

    async def start(self) -> None:
        """Check that it can be used at all. UserError for what the user must fix."""

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        """Begin a rollout. `row` is the data row without its prompt; SampleError if it cannot be played."""
        ...

    def outage(self) -> str | None:
        """Why no rollout can begin now. A call may raise RewardOutage, which is no sample's fault."""
        ...

    async def close(self) -> None: ...


class EnvironmentDouble:
    """Answers by a plain function of the row and the model's texts so far, and counts open episodes."""

    def __init__(self, answer: Callable[[Mapping[str, Any], list[str]], Answer], *, opening: str = "") -> None:
        self.answer, self.opening = answer, opening
        self.num_open = 0
        self.out: str | None = None

    async def start(self) -> None:
        pass

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        self.num_open += 1
        return _EpisodeDouble(self, row)

    def outage(self) -> str | None:
        return self.out

    async def close(self) -> None:
        pass


class _EpisodeDouble:
    def __init__(self, environment: EnvironmentDouble, row: Mapping[str, Any]) -> None:
        self.opening = environment.opening
        self._environment, self._row = environment, row
        self._completions: list[str] = []

    async def step(self, completion: str) -> Answer:
        self._completions.append(completion)
        return self._environment.answer(self._row, self._completions)

    async def close(self) -> None:
        self._environment.num_open -= 1
