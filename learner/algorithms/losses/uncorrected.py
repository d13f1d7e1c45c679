"""Plain REINFORCE: -A log pi, as if everything had been sampled by today's policy."""

from __future__ import annotations

import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses.ratios import token_ratio


def uncorrected(logpi: torch.Tensor, tokens: Tokens) -> TokenLosses:
    ratio = token_ratio(logpi, tokens.logmu)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(
        values=-tokens.advantage * logpi, ratio=ratio, weight=torch.ones_like(ratio), clipped=none, masked=none
    )
