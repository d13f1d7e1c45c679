"""PPO's clip on the ratio to the policy that sampled: -min(r A, clip(r, lo, hi) A), with the gradient through r."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ratios import log_ratio, token_ratio


def ppo(logpi: torch.Tensor, tokens: Tokens, *, bounds: tuple[float, float]) -> TokenLosses:
    ratio = torch.exp(log_ratio(logpi, tokens.logmu))
    values, clipped = pessimistic(ratio, tokens.advantage, bounds)
    return TokenLosses(
        values=values,
        ratio=token_ratio(logpi, tokens.logmu),
        weight=ratio.detach().clamp(*bounds),
        clipped=clipped,
        masked=torch.zeros_like(clipped),
    )


def pessimistic(
    ratio: torch.Tensor, advantage: torch.Tensor, bounds: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:  # [T] values, [T] bool: the clip took the gradient away
    low, high = bounds
    values = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    clipped = ((ratio > high) & (advantage > 0)) | ((ratio < low) & (advantage < 0))
    return values, clipped
