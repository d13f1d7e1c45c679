"""Geometric sequence mask: -sg(min(r, C) 1[lo <= g <= hi]) A log pi, with g the geometric mean of r over the response.

A response whose tokens drifted on the whole teaches nothing; in the others each token is corrected as by `truncated`.
"""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ratios import log_sequence_ratio, outside, token_ratio


def sequence_mask(logpi: torch.Tensor, tokens: Tokens, *, bounds: tuple[float, float], clamp: float) -> TokenLosses:
    ratio = token_ratio(logpi, tokens.logmu)
    masked = outside(torch.exp(log_sequence_ratio(logpi.detach(), tokens)), bounds)
    weight = ratio.clamp(max=clamp).masked_fill(masked, 0.0)
    return TokenLosses(
        values=-weight * tokens.advantage * logpi,
        ratio=ratio,
        weight=weight,
        clipped=(ratio > clamp) & ~masked,
        masked=masked,
    )
