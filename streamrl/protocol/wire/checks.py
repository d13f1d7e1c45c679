"""Checks of a group's arrays, whoever sent them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError

_UNSIGNED = np.dtype("<u4")
_largest, _least = np.maximum.reduce, np.minimum.reduce  # an array's own methods add some microseconds of overhead


def check_tokens(token_ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    # As an unsigned number, a negative id is beyond every vocabulary.
    if len(token_ids) and _largest(token_ids.view(_UNSIGNED)) >= vocabulary:
        raise WireError(f"token ids must be from 0 to {vocabulary - 1}, as in the vocabulary")


def check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    # A NaN propagates through both reductions and fails both comparisons.
    if len(logprobs) and not (_least(logprobs) > -math.inf and _largest(logprobs) <= 1e-3):
        raise WireError("log-probs must be finite and at most 0")


def check_cover(runs: Sequence[int], spans: Sequence[tuple[int, int, int, int]], length: int) -> None:
    """Raise WireError unless the spans are ordered, lie in the sample, and cover all tokens that have a loss."""
    if length and len(spans) == 1 and spans[0][2:] == (0, length):  # covers any runs
        return
    covered: list[tuple[int, int]] = []
    reached = 0
    for _, _, start, end in spans:
        if start < reached or end <= start:
            raise WireError("version spans must not overlap or be empty")
        covered.append((covered.pop()[0] if covered and start == reached else start, end))
        reached = end
    if reached > length:
        raise WireError(f"version spans reach to {reached} of {length} tokens")
    bounds = list(accumulate(runs, initial=0))
    for start, end in zip(bounds[:-1:2], bounds[1::2], strict=True):
        if start < end and not any(begin <= start and end <= until for begin, until in covered):
            raise WireError(f"tokens {start} to {end} have a loss but no version")
