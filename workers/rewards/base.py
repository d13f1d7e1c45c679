"""The seam between a worker and what scores its samples: one item in, one finite number a source out, or RewardError.

A source may say None instead: it does not apply to this sample, and the others' rewards count alone. A score that is
missing, late, NaN or infinite is never a number. Each source bounds its own waits. `mixing` puts sources together.
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

Score: TypeAlias = "float | npt.NDArray[np.float64] | None"  # [T]: of each token; the reward is their sum
Spend = Callable[[str, int], Awaitable[int]]  # of what, how many more ─► how many all workers of the run have spent


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    prompt: str
    completion: str
    token_ids: npt.NDArray[np.int32]  # [T] of the completion
    fields: Mapping[str, Any] = field(default_factory=dict)  # the dataset row's further fields, `answer` for one
    finish_reason: FinishReason = "stop"  # "length": it was cut off
    rewards: Mapping[str, float] = field(default_factory=dict)  # for sources of groups: what the others gave

    @property
    def sample(self) -> dict[str, Any]:
        """What differs within a group, as JSON has it."""
        told = {"completion": self.completion, "token_ids": self.token_ids.tolist()}
        return {**told, "finish_reason": self.finish_reason, "rewards": dict(self.rewards)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a source does, as people and the taking of tickets want to know it."""

    outage: str | None = None  # why it cannot score at all now
    state: str = "well"
    num_tokens: int | None = None  # that judges have read and written; None of other sources


class Reward(Protocol):
    """One source. `score` may be called many times at once."""

    async def start(self) -> None:
        """Show that the source can be used at all; what the user must mend is a UserError."""

    async def score(self, item: ScoreItem) -> Score:
        """A finite number within the source's own time limit, or one for each token; None where it does not apply to
        the sample; or RewardError, RewardOutage where the sample is not at fault."""

    def health(self) -> Health: ...

    async def close(self) -> None: ...


@runtime_checkable
class GroupReward(Protocol):
    """A source that sees all samples of a prompt at once, when the others have scored them."""

    async def start(self) -> None: ...

    async def score_group(self, items: Sequence[ScoreItem]) -> Sequence[float | RewardError | None]:
        """For each what `score` has of one. RewardError: none has a score; RewardOutage: as above."""

    def health(self) -> Health: ...

    async def close(self) -> None: ...


class RewardDouble:
    """Scores by a plain function, remembers what it was asked, and waits or is out when told to."""

    def __init__(self, judge: Callable[[ScoreItem], Score] = lambda item: 1.0) -> None:
        self._judge = judge
        self.items: list[ScoreItem] = []
        self.outage: str | None = None
        self.held: asyncio.Event | None = None  # scores wait for it
        self.closed = False

    async def start(self) -> None:
        pass

    async def score(self, item: ScoreItem) -> Score:
        self.items.append(item)
        if self.held is not None:
            await self.held.wait()
        return self._judge(item)

    def health(self) -> Health:
        return Health(outage=self.outage)

    async def close(self) -> None:
        self.closed = True
