"""Truncated importance sampling: -sg(min(r, C)) A log pi.

`truncated` and `tis` differ in their default of C only. With the gradient going through log pi, and not through r as in
PPO, a token beyond C still teaches, with weight C.
"""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ratios import token_ratio


def truncated(logpi: torch.Tensor, tokens: Tokens, *, clamp: float) -> TokenLosses:
    ratio = token_ratio(logpi, tokens.logmu)
    weight = ratio.clamp(max=clamp)
    return TokenLosses(
        values=-weight * tokens.advantage * logpi,
        ratio=ratio,
        weight=weight,
        clipped=ratio > clamp,
        masked=torch.zeros_like(ratio, dtype=torch.bool),
    )
