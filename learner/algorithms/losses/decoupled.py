"""Decoupled PPO: -sg(min(pi_p / mu, C)) min(q A, clip(q, lo, hi) A), with q = pi / pi_p and the gradient through q.

How far the policy may move in the passes over one batch is bounded from where it stood before the first (pi_p); how old
the samples are is corrected apart from that. With one pass q = 1, and this is `truncated`.
"""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ppo import pessimistic
from learner.algorithms.losses.ratios import log_ratio, token_ratio


def decoupled(logpi: torch.Tensor, tokens: Tokens, *, bounds: tuple[float, float], clamp: float) -> TokenLosses:
    behaviour = token_ratio(tokens.logprox, tokens.logmu)
    weight = behaviour.clamp(max=clamp)
    moved = torch.exp(log_ratio(logpi, tokens.logprox))
    values, clipped = pessimistic(moved, tokens.advantage, bounds)
    return TokenLosses(
        values=weight * values,
        ratio=token_ratio(logpi, tokens.logmu),
        weight=weight * moved.detach().clamp(*bounds),
        clipped=clipped | (behaviour > clamp),
        masked=torch.zeros_like(clipped),
    )
