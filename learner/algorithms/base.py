"""The seam between the step loop and what is learnt: which groups, which samples, what advantage, what loss.

An algorithm is asked four things, in this order, and never blocks:

    keep(header)            rank 0, before a group is planned: a reason to drop it, or None
    select(group)           which samples have a loss, and which count in the mean
    advantages(group, ...)  one number a sample, from this group's own samples only, so that ranks need not talk
    loss(logpi, tokens)     one number a token; the loop weighs and sums them, once for each pass over the batch:

    loss = sum over tokens of  weight_t * loss_t,   weight_t = 1 / (N * T_i)   loss_mean: sequence
                                                    weight_t = 1 / T           loss_mean: token

where N counts the samples that `select` counts and T the trained tokens, both over the whole global batch: so the loss
is one and the same however the batch is cut into micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from streamrl.wire.group import Group, GroupHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    trained: npt.NDArray[np.bool_]  # [n] has a loss
    counted: npt.NDArray[np.bool_]  # [n] is one of the N of a mean over sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    values: npt.NDArray[np.float64]  # [n]
    baselines: npt.NDArray[np.float64]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The trained tokens of one micro-batch, flat; everything but log pi itself, and all of it constant."""

    logmu: torch.Tensor  # [T] of the engine that sampled the token
    logprox: torch.Tensor  # [T] of the policy before the first pass over the batch
    logref: torch.Tensor | None  # [T] of the reference; None when no KL is asked for
    advantage: torch.Tensor  # [T]
    sample: torch.Tensor  # [T] whose token it is, from 0 up to num_samples; all tokens of a sample are here
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    values: torch.Tensor  # [T] carries the gradient
    ratio: torch.Tensor  # [T] pi / mu, before any clamp; no gradient
    weight: torch.Tensor  # [T] what the loss made of it; no gradient
    clipped: torch.Tensor  # [T] bool: a bound changed what the token teaches
    masked: torch.Tensor  # [T] bool: a bound took the token out


class Algorithm(Protocol):
    needs_reference: bool  # ask for the reference's log-probs

    def keep(self, header: GroupHeader) -> str | None: ...
    def select(self, group: Group) -> Selection: ...
    def penalty(self, logmu: torch.Tensor, logref: torch.Tensor) -> torch.Tensor:
        """[T] what each token costs its sample's reward, as a mean over the sample's tokens."""
        ...

    def advantages(self, group: Group, penalties: npt.NDArray[np.float64]) -> Advantages: ...
    def loss(self, logpi: torch.Tensor, tokens: Tokens) -> TokenLosses: ...


def usable(finished: npt.ArrayLike, *, mask_unfinished: bool) -> npt.NDArray[np.bool_]:  # [n]
    """Samples that may teach: those that ended by themselves, or all where the setting says so."""
    ended = np.asarray(finished, dtype=np.bool_)
    return ended if mask_unfinished else np.ones_like(ended)
