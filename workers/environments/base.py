"""The seam between a worker and what its model plays against: a rollout begins with a row, and goes on turn by turn.

    begin (a row) ──► Episode ──► step (what the model said) ──► what it is given, its reward ──► ... ──► close

An environment knows nothing of tokens, versions and tickets: it reads text and says text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ENVIRONMENT = "environment"  # the name of its rewards among the sources
MAX_GIVEN_CHARS = 1 << 20  # of what an environment says at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To one turn of the model."""

    given: str = ""  # what the model reads before its next turn
    reward: float = 0.0  # of this turn; a rollout's is the sum
    done: bool = False


def read_answer(given: object, reward: object, done: object) -> Answer:
    """What came of another process: ValueError where no model could be told it, or no learner count it."""
    if not isinstance(done, bool):
        raise ValueError(f"answered 'done' = {done!r:.80}, which is neither true nor false")
    return Answer(given=read_text(given), reward=read_reward(reward), done=done)


def read_reward(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"answered 'reward' = {value!r:.80}, which is no finite number")
    return float(value)


def read_text(value: object, name: str = "observation") -> str:
    """Nothing is the empty text. ValueError where it is none, or has half a character: no tokenizer takes it."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"answered {name!r} = {value!r:.80}, which is no text")
    if len(value) > MAX_GIVEN_CHARS:
        raise ValueError(f"answered {name!r} of {len(value)} characters; it may have {MAX_GIVEN_CHARS}")
    value.encode()
    return value


class Episode(Protocol):
    """One rollout. SampleError from any call: the rollout is lost, and others go on."""

    opening: str  # what the environment says before the first turn, behind the prompt

    async def step(self, said: str) -> Answer: ...

    async def close(self) -> None:
        """Whatever state it is in; never raises."""


class Environment(Protocol):
    """What rollouts are begun in; many may be under way at once."""

    async def start(self) -> None:
        """Show that it can be used at all; what the user must mend is a UserError."""

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        """`row` is the prompt's row without its prompt; SampleError where it cannot be played."""
        ...

    def outage(self) -> str | None:
        """Why no rollout can be begun at all now; RewardOutage from a call: no sample is at fault."""
        ...

    async def close(self) -> None: ...


class EnvironmentDouble:
    """Answers by a plain function of the row and all that was said, and remembers what was closed."""

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
        self._said: list[str] = []

    async def step(self, said: str) -> Answer:
        self._said.append(said)
        return self._environment.answer(self._row, self._said)

    async def close(self) -> None:
        self._environment.num_open -= 1
