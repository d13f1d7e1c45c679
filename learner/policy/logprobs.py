"""Log-probs of given tokens from hidden states, without ever holding [tokens, vocabulary] whole.

    logits  = hidden @ head.T / temperature          those of end tokens -> -inf while `early`
    logp_t  = logits_t[target_t] - logsumexp(logits_t)          at least fp32
    entropy = -sum p log p                                      no gradient

Chunks of tokens are projected, reduced and thrown away; the backward pass projects them again, and adds each chunk's
gradient of the head in place. The temperature and the ban on early ends are those of the engine (its *processed*
log-probs), so that pi / mu compares like with like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_CHUNK_ELEMENTS = 1 << 25  # logits held at a time: 128 MiB in fp32
_BANNED = -1e30  # not -inf: 0 * -inf would make the entropy NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How logits are made beyond the projection itself."""

    temperature: float = 1.0
    end_ids: tuple[int, ...] = ()  # tokens that may not be sampled while a response is shorter than min_tokens
    compute_dtype: torch.dtype = torch.float32  # of the projection; what follows it is at least fp32
    chunk_elements: int = _CHUNK_ELEMENTS


class LogProbs(NamedTuple):
    """A tuple and not a dataclass: FSDP looks into a module's output for tensors to hang its backward hooks on."""

    logp: torch.Tensor  # [T] carries the gradient
    entropy: torch.Tensor  # [T] no gradient


def token_logprobs(
    hidden: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [V, H]
    targets: torch.Tensor,  # [T]
    early: torch.Tensor,  # [T] bool: end tokens are banned here
    head: Head,
) -> LogProbs:
    # Under autocast the dtypes are ours to choose: this function states them.
    with torch.autocast(hidden.device.type, enabled=False):
        logp, entropy = _TokenLogProbs.apply(hidden, weight, targets, early, head)
    return LogProbs(logp=logp, entropy=entropy)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        early: torch.Tensor,
        head: Head,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(head.compute_dtype, torch.float32)
        logp, entropy, total = (torch.empty(len(targets), dtype=wide, device=hidden.device) for _ in range(3))
        matrix = weight.to(head.compute_dtype)
        for part in _chunks(len(targets), len(weight), head.chunk_elements):
            logits = _logits(hidden[part], matrix, targets[part], early[part], head)
            total[part] = logits.logsumexp(dim=-1)
            logits -= total[part, None]
            logp[part] = logits.gather(1, targets[part, None])[:, 0]
            entropy[part] = -torch.bmm(logits.exp()[:, None], logits[:, :, None])[:, 0, 0]  # no third [t, V]
        ctx.save_for_backward(hidden, weight, targets, early, total)
        ctx.head = head
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d logp_t / d logits_t = (one-hot of the target - softmax), then through the projection."""
        hidden, weight, targets, early, total = ctx.saved_tensors
        head: Head = ctx.head
        matrix = weight.to(head.compute_dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(targets), len(weight), head.chunk_elements):
            logits = _logits(hidden[part], matrix, targets[part], early[part], head)
            scale = grads[0][part, None] / head.temperature
            grad = logits.sub_(total[part, None]).exp_().mul_(-scale)
            grad = grad.scatter_add_(1, targets[part, None], scale).to(head.compute_dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part].to(head.compute_dtype)
        return grad_hidden, grad_weight, None, None, None


def _logits(
    hidden: torch.Tensor, matrix: torch.Tensor, targets: torch.Tensor, early: torch.Tensor, head: Head
) -> torch.Tensor:  # [t, V] at least fp32
    projected = hidden.to(head.compute_dtype) @ matrix.T
    logits = projected.to(torch.promote_types(head.compute_dtype, torch.float32))
    if head.temperature != 1:
        logits /= head.temperature
    if head.end_ids:
        ends = torch.tensor(head.end_ids, device=logits.device)
        # A response that ended early all the same (another engine, another end token) keeps a finite log-prob.
        banned = early[:, None] & (targets[:, None] != ends)
        logits[:, ends] = logits[:, ends].masked_fill(banned, _BANNED)
    return logits


def _chunks(num_tokens: int, vocabulary: int, elements: int) -> Iterator[slice]:
    size = max(1, elements // vocabulary)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))
