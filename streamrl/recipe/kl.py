"""Estimates of KL(pi || pi_ref) from the sampled tokens alone, with d = log pi - log pi_ref:

k1 = d                  unbiased, may be negative
k2 = d^2 / 2            its gradient is the gradient of the KL
k3 = exp(-d) - 1 + d    unbiased and never negative
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs - reference_logprobs


def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    return 0.5 * (logprobs - reference_logprobs) ** 2


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    difference = reference_logprobs - logprobs
    return difference.expm1() - difference


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
