"""Rows of a sample: one sequence for most; several where a turn did not continue after the tokens so far.

    prompt | a a | b b | c c        row 0: the tokens after the prompt, up to where the first branch starts
                 |
                 └─ keep ─ d d | e e    row 1: the first `keep` tokens of row 0, its prompt included, then its own

A sample's tokens are stored end to end, row by row. Each is stored once, however many rows contain it, and so has at
most one loss. A branch that keeps nothing has a context of its own, without even the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import Count

MAX_BRANCHES = 256  # per sample
MAX_KEPT_TOKENS = 1 << 24  # per group, over all branches: tokens that a learner may have to compute again


class Branch(NamedTuple):
    start: Count  # of its own tokens among the sample's; they end where the next branch's begin
    row: Count  # the earlier row that it leaves
    keep: Count  # number of that row's tokens, prompt included, before its own


def rows_of(num_prompt: int, num_tokens: int, branches: Sequence[Branch]) -> list[npt.NDArray[np.int64]]:
    """Return the positions of each row's tokens in prompt and sample, concatenated."""
    ends = [*(branch.start for branch in branches[1:]), num_tokens]
    rows = [np.arange(num_prompt + (branches[0].start if branches else num_tokens))]
    for branch, end in zip(branches, ends, strict=False):
        own = np.arange(num_prompt + branch.start, num_prompt + end)
        rows.append(np.concatenate([rows[branch.row][: branch.keep], own]))
    return rows


def check_branches(
    branches: Sequence[Branch], *, num_prompt: int, num_tokens: int, spans: Sequence[tuple[int, int]]
) -> None:
    """Raise WireError unless the branches are valid; `spans` are the sampled ranges, in order."""
    if not branches:
        return
    starts = [branch.start for branch in branches]
    ends = [*starts[1:], num_tokens]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise WireError(f"a branch has no tokens of its own: {num_tokens} tokens, and branches from {starts}")
    lengths = [num_prompt + starts[0]]
    for at, (branch, end) in enumerate(zip(branches, ends, strict=True), start=1):
        if branch.row >= at or branch.keep > lengths[branch.row]:
            raise WireError(f"branch {at} keeps {branch.keep} tokens of row {branch.row}, which has fewer")
        lengths.append(branch.keep + end - branch.start)
    keeps = {branch.start: branch.keep for branch in branches}
    for start, end in spans:
        if any(start < place < end for place in starts):
            raise WireError(f"the version span from {start} to {end} continues in another row")
        if not keeps.get(start, 1):
            raise WireError(f"token {start} was sampled without any context")
