"""What each token of a group's samples earned by itself, where any did: in a body's message, f4 a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import Fields

_FIELD, _F4 = "token_rewards", np.dtype("<f4")
Earned = npt.NDArray[np.float32] | None  # [T] of a sample; None: no token earns by itself


def pack_earned(earned: Sequence[Earned], lengths: Sequence[int]) -> dict[str, bytes]:
    if all(rewards is None for rewards in earned):
        return {}
    each = [np.zeros(n) if rewards is None else rewards for rewards, n in zip(earned, lengths, strict=True)]
    if [len(rewards) for rewards in each] != list(lengths):
        raise WireError("a sample has not as many rewards of tokens as tokens")
    return {_FIELD: np.concatenate(each).astype(_F4).tobytes()}


def take_earned(f: Fields, lengths: Sequence[int]) -> list[Earned]:
    if _FIELD not in f:
        return [None] * len(lengths)
    earned = f.array(_FIELD, _F4, count=sum(lengths))
    if not np.isfinite(earned).all():
        raise WireError("rewards of tokens must be finite")
    return list(np.split(earned, np.cumsum(lengths)[:-1]))
