"""Rows of a sample: one sequence for most; several where a turn did not go on behind the tokens so far.

    prompt | a a | b b | c c        row 0: what lies behind the prompt, up to where the first branch starts
                 |
                 └─ keep ─ d d | e e    row 1: the first `keep` tokens of row 0, its prompt included, then its own

A sample's tokens lie end to end, row by row: each stands there once, however many rows it is in, and so has one loss at
most. A branch that keeps nothing has a context of its own, of which not even the prompt is a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import Count

MAX_BRANCHES = 256  # of a sample
MAX_KEPT_TOKENS = 1 << 24  # of a group, by all its branches: what a learner may have to compute again


class Branch(NamedTuple):
    start: Count  # of its own tokens among the sample's; they end where those of the next begin
    row: Count  # that it leaves, an earlier one
    keep: Count  # so many tokens of that row, prompt included, stand before its own


def rows_of(num_prompt: int, num_tokens: int, branches: Sequence[Branch]) -> list[npt.NDArray[np.int64]]:
    """Of each row the places of its tokens, in prompt and sample laid end to end."""
    ends = [*(branch.start for branch in branches[1:]), num_tokens]
    rows = [np.arange(num_prompt + (branches[0].start if branches else num_tokens))]
    for branch, end in zip(branches, ends, strict=False):
        own = np.arange(num_prompt + branch.start, num_prompt + end)
        rows.append(np.concatenate([rows[branch.row][: branch.keep], own]))
    return rows


def check_branches(
    branches: Sequence[Branch], *, num_prompt: int, num_tokens: int, spans: Sequence[tuple[int, int]]
) -> None:
    """`spans`: where tokens were sampled, in order."""
    if not branches:
        return
    starts = [branch.start for branch in branches]
    ends = [*starts[1:], num_tokens]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise WireError(f"a branch has no tokens of its own: {num_tokens} tokens, and branches from {starts}")
    lengths = [num_prompt + starts[0]]
    for at, (branch, end) in enumerate(zip(branches, ends, strict=True), start=1):
        if branch.row >= at or branch.keep > lengths[branch.row]:
            raise WireError(f"branch {at} keeps {branch.keep} tokens of row {branch.row}, which has not as many")
        lengths.append(branch.keep + end - branch.start)
    keeps = {branch.start: branch.keep for branch in branches}
    for start, end in spans:
        if any(start < place < end for place in starts):
            raise WireError(f"the version span from {start} to {end} goes on in another row")
        if not keeps.get(start, 1):
            raise WireError(f"token {start} was sampled behind nothing")
