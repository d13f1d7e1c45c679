"""The seam between a worker and a teacher: of tokens behind a context, a log-prob each.

A rollout of several rows is asked about row by row, as it was sampled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamrl.protocol.wire.branches import rows_of as places_of
from streamrl.protocol.wire.sample import Sample

Ids = npt.NDArray[np.int32]


class Teaches(Protocol):
    async def logprobs(self, context: Ids, tokens: Ids) -> npt.NDArray[np.float32]:
        """[T] of these tokens behind that context, finite; RewardError, or RewardOutage where no sample is at fault.
        Without a context the first token has none: 0, for it was given."""

    def outage(self) -> str | None: ...

    @property
    def state(self) -> str: ...

    async def close(self) -> None: ...


class TeacherDouble:
    """Gives every token the same, and remembers what it was asked."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob, self.asked, self.out = logprob, list[tuple[list[int], list[int]]](), ""

    async def logprobs(self, context: Ids, tokens: Ids) -> npt.NDArray[np.float32]:
        self.asked.append((context.tolist(), tokens.tolist()))
        return np.full(len(tokens), self.logprob, dtype=np.float32)

    def outage(self) -> str | None:
        return self.out or None

    @property
    def state(self) -> str:
        return self.out or "well"

    async def close(self) -> None:
        pass


def rows_of(prompt: Ids, sample: Sample) -> list[tuple[Ids, Ids]]:
    """(what stands before, own tokens) of each row; together the rows' own tokens are the sample's."""
    tokens = np.concatenate([prompt, sample.token_ids])
    rows = places_of(len(prompt), len(sample.token_ids), sample.branches)
    kept = (len(prompt), *(branch.keep for branch in sample.branches))
    return [(tokens[row[:keep]], tokens[row[keep:]]) for row, keep in zip(rows, kept, strict=True)]
