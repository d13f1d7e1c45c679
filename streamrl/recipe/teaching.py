"""On-policy distillation: the teacher's term in the loss of each token that the policy itself has sampled.

    loss_t + alpha sg(w_t) d_t^2 / 2,   d_t = log pi_t - log tau_t

tau is the teacher, alpha `teacher.weight`, and w_t the loss's weight for the token (1 if it has none). The gradient,
alpha w_t d_t grad log pi_t, is that of the reverse KL(pi || tau) of the next token, in expectation over pi, or over an
older policy as long as no ratio is clamped. Each token is credited for itself only, not for what follows (Agarwal et
al. 2023, arXiv 2306.13649, with its reverse KL and lambda = 1; "On-Policy Distillation", Thinking Machines Lab 2025).
There the advantage is log tau - log mu, of the policy that sampled. Here d uses the current policy, which is the same
on-policy, and pulls stale tokens to the teacher and no further: where pi = tau, a token teaches nothing.

Tokens that the teacher considers impossible would dominate the batch: d is at most 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.recipe.losses import MAX_LOG, Losses, TokenBatch, k2, weight_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from streamrl.recipe.losses import Metric


def with_teacher_term(
    values: torch.Tensor, metrics: Mapping[str, Metric], batch: TokenBatch, *, weight: float
) -> Losses:
    """Add the teacher's term, with the mean of d as the metric `teacher_kl`: on-policy, it estimates the reverse KL."""
    assert batch.teacher_logprobs is not None, "requested whenever there is a teacher"
    now = batch.logprobs.detach()
    difference = now - batch.teacher_logprobs
    pull = k2(batch.logprobs, batch.teacher_logprobs.maximum(now - MAX_LOG))
    return values + weight * weight_of(metrics) * pull, {**metrics, "teacher_kl": difference}
