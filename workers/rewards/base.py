"""The interface between a worker and what scores its samples: one item in, one finite number per source or RewardError.

A source may return None: it does not apply to this sample, and only the other sources' rewards count. A missing, late,
NaN or infinite score is an error, never a number. Each source bounds its own waits. `mixing` combines the sources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from streamrl.errors import RewardError
from streamrl.protocol.wire.sample import FinishReason

Score: TypeAlias = "float | npt.NDArray[np.float64] | None"  # [T]: one per token; the reward is their sum
Spend = Callable[[str, int], Awaitable[int]]  # (what, amount to add) ─► the total of all workers of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    prompt: str
    completion: str
    token_ids: npt.NDArray[np.int32]  # [T] of the completion
    fields: Mapping[str, Any] = field(default_factory=dict)  # the other fields of the data row, such as `answer`
    finish_reason: FinishReason = "stop"  # "length": truncated
    rewards: Mapping[str, float] = field(default_factory=dict)  # for group sources: the other sources' rewards
    end: str = ""  # the text of its end token, and what the chat template writes after it; empty: cut off

    @property
    def is_chat(self) -> bool:
        """The prompt's special tokens were written by the chat template."""
        return "messages" in self.fields

    @property
    def text(self) -> str:
        """Prompt and completion as a reward model reads them: a chat to its end."""
        return self.prompt + self.completion + (self.end if self.is_chat else "")

    @property
    def sample(self) -> dict[str, Any]:
        """What differs within a group, as JSON data."""
        return {
            "completion": self.completion,
            "token_ids": self.token_ids.tolist(),
            "finish_reason": self.finish_reason,
            "rewards": dict(self.rewards),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """A source's state, for the monitor and for the decision to lease tickets."""

    outage: str | None = None  # why it cannot score at all now
    state: str = "well"
    num_tokens: int | None = None  # read and written by judges; None for other sources


class Reward(Protocol):
    """One source. `score` may be called many times concurrently."""

    async def start(self) -> None:
        """Check that the source can be used at all. UserError for what the user must fix."""

    async def score(self, item: ScoreItem) -> Score:
        """Return a finite number within the source's own time limit, or one per token; None if it does not apply to the
        sample. RewardError if the sample cannot be scored, RewardOutage if that is not the sample's fault."""

    def health(self) -> SourceHealth: ...

    async def close(self) -> None: ...


@runtime_checkable
class GroupReward(Protocol):
    """A source that scores all samples of a prompt together, after the other sources."""

    async def start(self) -> None: ...

    async def score_group(self, items: Sequence[ScoreItem]) -> Sequence[float | RewardError | None]:
        """Return for each item what `score` would. RewardError: none has a score; RewardOutage: as in `score`."""

    def health(self) -> SourceHealth: ...

    async def close(self) -> None: ...


class RewardDouble:
    """Scores by a plain function, records its items, and waits or reports an outage on request."""

    def __init__(self, judge: Callable[[ScoreItem], Score] = lambda item: 1.0) -> None:
        self._judge = judge
        self.items: list[ScoreItem] = []
        self.outage: str | None = None
        self.held: asyncio.Event | None = None  # scores wait for this
        self.closed = False

    async def start(self) -> None:
        pass

    async def score(self, item: ScoreItem) -> Score:
        self.items.append(item)
        if self.held is not None:
            await self.held.wait()
        return self._judge(item)

    def health(self) -> SourceHealth:
        return SourceHealth(outage=self.outage)

    async def close(self) -> None:
        self.closed = True
