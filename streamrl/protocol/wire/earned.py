"""Rewards of single tokens in a group's samples, if any: in the body's message, f4 per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import to_array

_F4 = np.dtype("<f4")
Earned = npt.NDArray[np.float32] | None  # [T] of a sample; None: no rewards per token


def pack_earned(earned: Sequence[Earned], lengths: Sequence[int]) -> bytes | None:
    if all(rewards is None for rewards in earned):
        return None
    each = [np.zeros(n) if rewards is None else rewards for rewards, n in zip(earned, lengths, strict=True)]
    if [len(rewards) for rewards in each] != list(lengths):
        raise WireError("a sample's token rewards and tokens differ in number")
    return np.concatenate(each).astype(_F4).tobytes()


def take_earned(packed: bytes | None, lengths: Sequence[int]) -> list[Earned]:
    if packed is None:
        return [None] * len(lengths)
    earned = to_array("token_rewards", packed, _F4, count=sum(lengths))
    if not np.isfinite(earned).all():
        raise WireError("token rewards must be finite")
    return list(np.split(earned, np.cumsum(lengths)[:-1]))
