"""Estimates of KL(pi || pi_ref) from the sampled tokens alone, with d = log pi - log pi_ref:

k1 = d                  unbiased, may be negative
k2 = d^2 / 2            its gradient is the gradient of the KL
k3 = exp(-d) - 1 + d    unbiased and never negative
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def k1(logp: torch.Tensor, logref: torch.Tensor) -> torch.Tensor:
    return logp - logref


def k2(logp: torch.Tensor, logref: torch.Tensor) -> torch.Tensor:
    return 0.5 * (logp - logref) ** 2


def k3(logp: torch.Tensor, logref: torch.Tensor) -> torch.Tensor:
    difference = logref - logp
    return torch.expm1(difference) - difference


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
