"""Off-policy corrections: how a token that an older policy sampled weighs in the loss of today's.

With r = pi / mu per token, mu the engine's own log-prob of what it sampled, sg the stop-gradient:

    truncated   -sg(min(r, C)) * A * log pi
    none        -A * log pi
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from learner.algorithms.base import TokenLosses, Tokens
from streamrl.config import schema

Correction = Callable[[torch.Tensor, Tokens], TokenLosses]


def truncated(logpi: torch.Tensor, tokens: Tokens, *, clamp: float) -> TokenLosses:
    ratio = _ratio(logpi, tokens)
    weight = ratio.clamp(max=clamp)
    return TokenLosses(values=-weight * tokens.advantage * logpi, ratio=ratio, weight=weight)


def uncorrected(logpi: torch.Tensor, tokens: Tokens) -> TokenLosses:
    ratio = _ratio(logpi, tokens)
    return TokenLosses(values=-tokens.advantage * logpi, ratio=ratio, weight=torch.ones_like(ratio))


def make_correction(settings: schema.Algorithm) -> Correction:
    corrections: Mapping[str, Correction] = {
        "truncated": partial(truncated, clamp=settings.ratio_clamp),
        "none": uncorrected,
    }
    return corrections[settings.correction]


def _ratio(logpi: torch.Tensor, tokens: Tokens) -> torch.Tensor:  # [T]
    return torch.exp(logpi.detach() - tokens.logmu)
