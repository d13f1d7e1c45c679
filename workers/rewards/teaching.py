"""The interface between a worker and a teacher: one logprob for each token after a context.

A rollout of several rows is asked about row by row, as it was sampled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from streamrl.protocol.wire.branches import rows_of
from streamrl.protocol.wire.sample import Sample

Ids = npt.NDArray[np.int32]


class Teaches(Protocol):
    async def logprobs(self, context: Ids, tokens: Ids) -> npt.NDArray[np.float32]:
        """Return [T] finite logprobs of these tokens after that context. RewardError, or RewardOutage if no sample is
        at fault. Without a context the first token has no logprob and gets 0."""

    def outage(self) -> str | None: ...

    @property
    def state(self) -> str: ...

    async def close(self) -> None: ...


class TeacherDouble:
    """Returns the same logprob for every token, and records its requests."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.logprob, self.requests, self.out = logprob, list[tuple[list[int], list[int]]](), ""

    async def logprobs(self, context: Ids, tokens: Ids) -> npt.NDArray[np.float32]:
        self.requests.append((context.tolist(), tokens.tolist()))
        return np.full(len(tokens), self.logprob, dtype=np.float32)

    def outage(self) -> str | None:
        return self.out or None

    @property
    def state(self) -> str:
        return self.out or "well"

    async def close(self) -> None:
        pass


def split_by_row(prompt: Ids, sample: Sample) -> list[tuple[Ids, Ids]]:
    """Return (context, own tokens) for each row; the rows' own tokens together are the sample's."""
    tokens = np.concatenate([prompt, sample.token_ids])
    rows = rows_of(len(prompt), len(sample.token_ids), sample.branches)
    lengths = (len(prompt), *(branch.keep for branch in sample.branches))
    return [(tokens[row[:keep]], tokens[row[keep:]]) for row, keep in zip(rows, lengths, strict=True)]
