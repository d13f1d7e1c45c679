"""How a token that an older policy sampled counts in the current policy's loss: each loss a function, beside its
formula.

Throughout, r = pi / mu is a token's ratio of the current policy to the one that sampled it, A the token's advantage,
pi_p the policy before the first pass over the batch, g the geometric mean of r over a response's trained tokens, and sg
the stop-gradient. C, lo, hi, lo' and hi' are the keyword arguments `clamp`, `low`, `high`, `clip_low`, `clip_high`,
which `algorithm.loss_args` sets:

    truncated, tis   -sg(min(r, C)) A log pi                                 C = 5 (also known as CISPO), C = 2
    sequence_mask    -sg(min(r, C) 1[lo <= g <= hi]) A log pi
    gspo             -min(g A, clip(g, lo, hi) A)                            for each token of the response
    ppo              -min(r A, clip(r, lo, hi) A)
    decoupled        -sg(min(pi_p / mu, C)) min(q A, clip(q, lo, hi) A)      q = pi / pi_p
    icepop           -sg(k 1[lo <= k <= hi]) min(q A, clip(q, lo', hi') A)   k = pi_p / mu
    none             -A log pi                                               plain REINFORCE

In expectation over mu, the gradient of `truncated`, `tis` and `decoupled` is that of the current policy as long as no
ratio reaches the clamp; that of `icepop`, `ppo` and, for responses of one token, `gspo` as long as none leaves the
bounds. Beyond, they are biased by design, to keep single tokens from dominating the batch. `sequence_mask` is unbiased
for the responses that it keeps, `none` only if nothing is stale.

A loss takes a batch and returns ([T] values, metrics by name). A metric is a tensor [T], whose mean over trained tokens
is published, or a pair (sum, count); over all ranks, as `loss/NAME`. Three names have a meaning here:

    weight    the loss's weight after bounding r; KL in the loss is weighed by it (by 1 if a loss has none)
    clipped   a bound changed what the token teaches     published as policy/clipped_fraction
    masked    a bound excluded the token                 published as policy/masked_fraction

The module also has estimates of KL(pi || pi_ref) from the sampled tokens alone, with d = log pi - log pi_ref:

    k1 = d                  unbiased, may be negative
    k2 = d^2 / 2            its gradient is the gradient of the KL
    k3 = exp(-d) - 1 + d    unbiased and never negative
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

Metric: TypeAlias = "torch.Tensor | tuple[torch.Tensor | float, torch.Tensor | float]"  # [T], or (sum, count)
Losses: TypeAlias = "tuple[torch.Tensor, Mapping[str, Metric]]"  # [T] values, metrics by name
F = TypeVar("F", bound=Callable[..., Any])

MAX_LOG = 20.0  # nats; larger ratios than e^20 = 4.9e8 teach nothing, and its square is still finite in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trained tokens of one micro-batch, concatenated. Only `logprobs` and `entropy` carry a gradient."""

    logprobs: torch.Tensor  # [T] log pi: of the current policy
    behaviour_logprobs: torch.Tensor  # [T] log mu: of the engine that sampled the token
    proximal_logprobs: torch.Tensor  # [T] log pi_p: of the policy before the first pass over the batch
    advantages: torch.Tensor  # [T]
    staleness: torch.Tensor  # [T] steps between the weights that sampled the token and the current ones
    sample: torch.Tensor  # [T] the token's sample, in [0, num_samples); all trained tokens of a sample are here
    num_samples: int
    reference_logprobs: torch.Tensor | None = None  # [T] log pi_ref; None where neither KL nor the loss needs it
    teacher_logprobs: torch.Tensor | None = None  # [T] None where there is no teacher
    entropy: torch.Tensor | None = None  # [T] of the next-token distribution; None where the loss does not need it


def weight_of(metrics: Mapping[str, Metric]) -> torch.Tensor | float:
    """Return the loss's weight of each token, as a constant: what it weighs must not teach through it."""
    weight = metrics.get("weight", 1.0)
    assert not isinstance(weight, tuple), "a weight is a number for each token"
    return weight if isinstance(weight, float) else weight.detach()


def needs(*what: Literal["entropy", "reference"]) -> Callable[[F], F]:
    """Mark a loss as `@needs("entropy")`: it reads inputs that are costly and computed only on request."""

    def mark(loss: F) -> F:
        loss.needs = frozenset(what)  # type: ignore[attr-defined]
        return loss

    return mark


def truncated(batch: TokenBatch, *, clamp: float = 5.0) -> Losses:
    """Truncated importance sampling: -sg(min(r, C)) A log pi.

    The gradient goes through log pi, not through r as in PPO, so a token beyond C still teaches, with weight C.
    """
    ratio = ratios(batch.logprobs.detach(), batch.behaviour_logprobs)
    weight = ratio.clamp(max=clamp)
    return -weight * batch.advantages * batch.logprobs, {"weight": weight, "clipped": ratio > clamp}


def sequence_mask(batch: TokenBatch, *, low: float = 0.99, high: float = 1.01, clamp: float = 5.0) -> Losses:
    """Geometric sequence mask: -sg(min(r, C) 1[lo <= g <= hi]) A log pi.

    A response whose tokens have drifted as a whole teaches nothing; in the others each token counts as in `truncated`.
    """
    ratio = ratios(batch.logprobs.detach(), batch.behaviour_logprobs)
    of_response = sequence_ratios(batch).detach()
    masked = (of_response < low) | (of_response > high)
    weight = ratio.clamp(max=clamp).masked_fill(masked, 0.0)
    metrics = {"weight": weight, "clipped": (ratio > clamp) & ~masked, "masked": masked}
    return -weight * batch.advantages * batch.logprobs, metrics


def gspo(batch: TokenBatch, *, low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> Losses:
    """GSPO: -min(g A, clip(g, lo, hi) A) for each token of a response.

    All tokens of a response have the same g, so with `loss_mean: sequence` their mean is the loss of the response.
    """
    return _pessimistic(sequence_ratios(batch), batch, low, high)


def ppo(batch: TokenBatch, *, low: float = 0.8, high: float = 1.2) -> Losses:
    """PPO's clip on the ratio to the policy that sampled: -min(r A, clip(r, lo, hi) A), with the gradient through r."""
    return _pessimistic(ratios(batch.logprobs, batch.behaviour_logprobs), batch, low, high)


def decoupled(batch: TokenBatch, *, low: float = 0.8, high: float = 1.2, clamp: float = 5.0) -> Losses:
    """Decoupled PPO: -sg(min(pi_p / mu, C)) min(q A, clip(q, lo, hi) A), with q = pi / pi_p and the gradient through q.

    The policy's movement in the passes over one batch is bounded relative to its state before the first (pi_p); the age
    of the samples is corrected separately. With a single pass q = 1, and this is `truncated`.
    """
    age = ratios(batch.proximal_logprobs, batch.behaviour_logprobs)
    moved = ratios(batch.logprobs, batch.proximal_logprobs)
    correction = age.clamp(max=clamp)
    values, of_moved = _pessimistic(moved, batch, low, high)
    metrics = {"weight": correction * of_moved["weight"], "clipped": of_moved["clipped"] | (age > clamp)}
    return correction * values, metrics


def icepop(
    batch: TokenBatch, *, low: float = 0.5, high: float = 5.0, clip_low: float = 0.8, clip_high: float = 1.2
) -> Losses:
    """IcePop: -sg(k 1[lo <= k <= hi]) min(q A, clip(q, lo', hi') A), with k = pi_p / mu and q = pi / pi_p.

    A token on which learner and engine disagree teaches nothing, in any pass.
    """
    age = ratios(batch.proximal_logprobs, batch.behaviour_logprobs)
    values, of_moved = _pessimistic(ratios(batch.logprobs, batch.proximal_logprobs), batch, clip_low, clip_high)
    masked = (age < low) | (age > high)
    correction = age.masked_fill(masked, 0.0)
    metrics = {
        "weight": correction * of_moved["weight"],
        "clipped": of_moved["clipped"] & ~masked,
        "masked": masked,
    }
    return correction * values, metrics


def uncorrected(batch: TokenBatch) -> Losses:
    """Plain REINFORCE: -A log pi, as if the current policy had sampled everything."""
    return -batch.advantages * batch.logprobs, {}


LOSSES: Mapping[str, Callable[..., Losses]] = {
    "truncated": truncated,
    "tis": partial(truncated, clamp=2.0),
    "icepop": icepop,
    "sequence_mask": sequence_mask,
    "gspo": gspo,
    "ppo": ppo,
    "decoupled": decoupled,
    "none": uncorrected,
}


def k1(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs - reference_logprobs


def k2(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    return 0.5 * (logprobs - reference_logprobs) ** 2


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate, bounded: an infinite value at one token would cost the whole step."""
    difference = _log_ratios(reference_logprobs, logprobs)
    return difference.expm1() - difference


KL_ESTIMATES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def ratios(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:  # [T]
    """Return p / q of each token, bounded whatever the engine returned."""
    return _log_ratios(logprobs, other_logprobs).exp()


def sequence_ratios(batch: TokenBatch) -> torch.Tensor:  # [T] the same for all tokens of a sample
    """Return g: the geometric mean of r over the trained tokens of a response."""
    each = _log_ratios(batch.logprobs, batch.behaviour_logprobs)
    total = each.new_zeros(batch.num_samples).index_add(0, batch.sample, each)
    count = each.new_zeros(batch.num_samples).index_add(0, batch.sample, each.new_ones(each.shape))
    mean: torch.Tensor = (total / count.clamp(min=1))[batch.sample]
    return mean.exp()


def _log_ratios(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:  # [T]
    return (logprobs - other_logprobs).clamp(max=MAX_LOG)


def _pessimistic(
    ratio: torch.Tensor, batch: TokenBatch, low: float, high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-min(r A, clip(r, lo, hi) A); clipped tokens have no gradient."""
    bounded, advantages = ratio.clamp(low, high), batch.advantages
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return -(ratio * advantages).minimum(bounded * advantages), {"weight": bounded.detach(), "clipped": clipped}
