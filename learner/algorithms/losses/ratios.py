"""Ratios of probabilities, of tokens and of whole responses, that stay finite whatever the engine said."""

from __future__ import annotations

import torch

from learner.algorithms.base import Tokens

_MAX_LOG = 20.0  # e^20 = 4.9e8: no policy learns from more, and its square is still finite in fp32


def log_ratio(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:  # [T]
    return (logp - logq).clamp(max=_MAX_LOG)


def token_ratio(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:  # [T] no gradient
    return torch.exp(log_ratio(logp.detach(), logq))


def log_sequence_ratio(logpi: torch.Tensor, tokens: Tokens) -> torch.Tensor:  # [T] the same for all tokens of a sample
    """log g: the mean of log r over the trained tokens of a response."""
    each = log_ratio(logpi, tokens.logmu)
    total = each.new_zeros(tokens.num_samples).index_add(0, tokens.sample, each)
    count = each.new_zeros(tokens.num_samples).index_add(0, tokens.sample, torch.ones_like(each))
    return (total / count.clamp(min=1))[tokens.sample]


def outside(ratio: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:  # [T] bool
    return (ratio < bounds[0]) | (ratio > bounds[1])
