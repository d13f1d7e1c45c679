"""A teacher's logprobs of a group's tokens, if the worker asked one: 0 for tokens that were not sampled.

Part of the body's message, one item per token of all samples, if the run has such a teacher; else nil.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError
from streamrl.protocol.wire.checks import check_logprobs
from streamrl.protocol.wire.codec import to_array

_F4 = np.dtype("<f4")
Taught = npt.NDArray[np.float32] | None  # [T] of a sample


def pack_taught(taught: Sequence[Taught], lengths: Sequence[int]) -> bytes | None:
    told = [each for each in taught if each is not None]
    if not told:
        return None
    if [len(each) for each in told] != list(lengths):
        raise WireError("a sample has not as many log-probs of the teacher as tokens")
    return np.concatenate(told).astype(_F4).tobytes()


def take_taught(told: bytes | None, lengths: Sequence[int]) -> list[Taught]:
    if told is None:
        return [None] * len(lengths)
    logprobs = to_array("teacher_logprobs", told, _F4, count=sum(lengths))
    check_logprobs(logprobs)
    return list(np.split(logprobs, np.cumsum(lengths)[:-1]))
