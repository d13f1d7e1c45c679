"""Log-probs of given tokens from hidden states, without ever materialising [tokens, vocabulary].

    z       = (hidden @ head.T + bias) * scale
    logits  = soft_cap * tanh(z / soft_cap) / temperature       those of end tokens -> -inf while `early`
    logp_t  = logits_t[target_t] - logsumexp(logits_t)          at least fp32
    entropy = -sum p log p                                      with a gradient only if `entropy_learns`

Bias, scale and cap apply if the model has them. Chunks of tokens are projected, reduced and discarded; the backward
pass projects them again, and accumulates each chunk's gradient of the head in place. A model that computes its logits
in yet another way returns them whole (`given_logprobs`). The temperature and the ban on early ends are those of the
engine (its *processed* log-probs), so that pi / mu compares like with like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from streamrl.learner.model.logits import Chunk, Head, Upstream, passes_on, sampled_from, wide_logits

# Logits held at a time, by device type: 128 MiB in fp32, and 1 GiB on a GPU. Each chunk reads and writes the head's
# gradient: with chunks of 2^25, which is 220 tokens at a vocabulary of 152,000, a GPU would be bound by memory traffic.
CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}


class LogProbs(NamedTuple):
    """A tuple, not a dataclass: FSDP searches a module's output for tensors to attach its backward hooks to."""

    logp: torch.Tensor  # [T] carries the gradient
    entropy: torch.Tensor  # [T] carries one if `entropy_learns`


def token_logprobs(
    hidden: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [V, H]
    targets: torch.Tensor,  # [T]
    early: torch.Tensor,  # [T] bool: end tokens are banned here
    head: Head,
    bias: torch.Tensor | None = None,  # [V]
    entropy_learns: bool = False,
) -> LogProbs:
    # No autocast: this function chooses its dtypes itself.
    with torch.autocast(hidden.device.type, enabled=False):
        # torch leaves `apply` untyped: its types are those of `forward`.
        logp, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, early, head, entropy_learns
        )
    return LogProbs(logp=logp, entropy=entropy)


def given_logprobs(
    logits: torch.Tensor,  # [T, V] the model's own
    targets: torch.Tensor,  # [T]
    early: torch.Tensor,  # [T] bool
    head: Head,
    entropy_learns: bool = False,
) -> LogProbs:
    """The same from whole logits, in the simplest form: autograd keeps what it needs of [T, V]."""
    wide = torch.promote_types(torch.promote_types(head.compute_dtype, logits.dtype), torch.float32)
    logp = sampled_from(logits.to(wide, copy=True), targets, early, head).log_softmax(-1)
    each = logp if entropy_learns else logp.detach()
    entropy = -(each.exp() * each).sum(-1)
    return LogProbs(logp=logp.gather(1, targets[:, None])[:, 0], entropy=entropy)


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Head) -> torch.Tensor:
    """[t, V] the model's logits, at least fp32. `weight` and `bias` have dtype `compute_dtype`."""
    return wide_logits(hidden.to(head.compute_dtype) @ weight.T, bias, head)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        early: torch.Tensor,
        head: Head,
        entropy_learns: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(head.compute_dtype, torch.float32)
        logp, entropy, total = (torch.empty(len(targets), dtype=wide, device=hidden.device) for _ in range(3))
        passes = passes_on(hidden.device)
        for part, chunk in _chunks(hidden, weight, bias, targets, early, head):
            logp[part], entropy[part], total[part] = passes.reduce(chunk, head)
        ctx.save_for_backward(hidden, weight, bias, targets, early, total, entropy if entropy_learns else None)
        ctx.head = head
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Backpropagate chunk by chunk, projecting each again."""
        hidden, weight, bias, targets, early, total, entropy = ctx.saved_tensors
        head: Head = ctx.head
        matrix = weight.to(head.compute_dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # At least fp32, even for a bf16 weight: chunks are summed before rounding.
        sums = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sums) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        passes = passes_on(hidden.device)
        for part, chunk in _chunks(hidden, weight, bias, targets, early, head):
            grad, of_bias = passes.gradient(chunk, _upstream(part, total, entropy, grads), head)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ matrix
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[part].to(head.compute_dtype))
            if grad_bias is not None and of_bias is not None:
                grad_bias += of_bias
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    early: torch.Tensor,
    head: Head,
) -> Iterator[tuple[slice, Chunk]]:
    matrix, offset = weight.to(head.compute_dtype), None if bias is None else bias.to(head.compute_dtype)
    elements = head.chunk_elements or CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cpu"])
    size, num_tokens = max(1, elements // len(weight)), len(targets)
    for start in range(0, num_tokens, size):
        part = slice(start, min(start + size, num_tokens))
        projected = hidden[part].to(head.compute_dtype) @ matrix.T
        yield part, Chunk(projected, offset, targets[part], early[part])


def _upstream(
    part: slice, total: torch.Tensor, entropy: torch.Tensor | None, grads: Sequence[torch.Tensor]
) -> Upstream:
    of_entropy = None if entropy is None else grads[1][part]
    return Upstream(total[part], grads[0][part], None if entropy is None else entropy[part], of_entropy)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right. On a GPU the product itself adds, in fp32 and without another pass over memory."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
