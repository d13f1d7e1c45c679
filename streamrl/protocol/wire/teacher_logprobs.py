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
TeacherLogprobs = npt.NDArray[np.float32] | None  # [T] of a sample


def pack_teacher_logprobs(logprobs: Sequence[TeacherLogprobs], lengths: Sequence[int]) -> bytes | None:
    given = [each for each in logprobs if each is not None]
    if not given:
        return None
    if [len(each) for each in given] != list(lengths):
        raise WireError("a sample's teacher log-probs and tokens differ in number")
    return np.concatenate(given).astype(_F4).tobytes()


def take_teacher_logprobs(packed: bytes | None, lengths: Sequence[int]) -> list[TeacherLogprobs]:
    if packed is None:
        return [None] * len(lengths)
    logprobs = to_array("teacher_logprobs", packed, _F4, count=sum(lengths))
    check_logprobs(logprobs)
    return list(np.split(logprobs, np.cumsum(lengths)[:-1]))
