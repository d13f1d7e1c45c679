"""On-policy distillation: what a teacher adds to the loss of each token that the policy itself has sampled.

    loss_t + alpha sg(w_t) d_t^2 / 2,   d_t = log pi_t - log tau_t

tau is the teacher, alpha `teacher.weight`, and w_t what the loss made of the token's ratio r (1 where it has none). The
gradient, alpha w_t d_t grad log pi_t, is that of the reverse KL(pi || tau) of the next token, in expectation over pi,
or over an older policy where no ratio is clamped. Each token answers for itself alone, not for where it leads to
(Agarwal et al. 2023, arXiv 2306.13649, with its reverse KL and lambda = 1; "On-Policy Distillation", Thinking Machines
Lab 2025). There the advantage is log tau - log mu, of the policy that sampled. Here d is today's policy's, which is the
same on-policy, and for stale tokens pulls to the teacher and no further: where pi = tau, no token teaches anything.

What the teacher finds impossible would rule the batch: d is at most 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.recipe.losses import Losses, TokenBatch, k2

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from streamrl.recipe.losses import Metric

_MOST = 20.0  # nats: e^20 = 4.9e8


def taught(values: torch.Tensor, metrics: Mapping[str, Metric], batch: TokenBatch, *, weight: float) -> Losses:
    """With the mean of d as the metric `teacher_kl`: on-policy, an estimate of the reverse KL."""
    assert batch.teacher_logprobs is not None, "asked for where there is a teacher"
    of_ratio = metrics.get("weight", 1.0)
    assert not isinstance(of_ratio, tuple), "a weight is a number for each token"
    now = batch.logprobs.detach()
    difference = now - batch.teacher_logprobs
    pull = k2(batch.logprobs, batch.teacher_logprobs.maximum(now - _MOST))
    return values + weight * of_ratio * pull, {**metrics, "teacher_kl": difference}
