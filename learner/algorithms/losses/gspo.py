"""GSPO: -min(g A, clip(g, lo, hi) A) for each token of a response, with g the geometric mean of its tokens' ratios.

All tokens of a response have the same g, so with `loss_mean: sequence` their mean is the loss of the response.
"""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ppo import pessimistic
from learner.algorithms.losses.ratios import log_sequence_ratio, token_ratio


def gspo(logpi: torch.Tensor, tokens: Tokens, *, bounds: tuple[float, float]) -> TokenLosses:
    ratio = torch.exp(log_sequence_ratio(logpi, tokens))
    values, clipped = pessimistic(ratio, tokens.advantage, bounds)
    return TokenLosses(
        values=values,
        ratio=token_ratio(logpi, tokens.logmu),
        weight=ratio.detach().clamp(*bounds),
        clipped=clipped,
        masked=torch.zeros_like(clipped),
    )
