"""IcePop: -sg(r 1[lo <= r <= hi]) A log pi. A token on which engine and learner disagree teaches nothing."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ratios import outside, token_ratio


def icepop(logpi: torch.Tensor, tokens: Tokens, *, bounds: tuple[float, float]) -> TokenLosses:
    ratio = token_ratio(logpi, tokens.logmu)
    masked = outside(ratio, bounds)
    weight = ratio.masked_fill(masked, 0.0)
    return TokenLosses(
        values=-weight * tokens.advantage * logpi,
        ratio=ratio,
        weight=weight,
        clipped=torch.zeros_like(masked),
        masked=masked,
    )
