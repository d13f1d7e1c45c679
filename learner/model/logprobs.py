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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# Logits held at a time, by device type: 128 MiB in fp32, and 1 GiB on a GPU. Each chunk reads and writes the head's
# gradient: with chunks of 2^25, which is 220 tokens at a vocabulary of 152,000, a GPU would be bound by memory traffic.
CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}
_BANNED = -1e30  # not -inf: 0 * -inf would make the entropy NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How logits are computed beyond the projection itself."""

    scale: float = 1.0  # scale and cap come from the model
    soft_cap: float | None = None
    temperature: float = 1.0
    end_ids: tuple[int, ...] = ()  # tokens that may not be sampled while a response is shorter than min_tokens
    compute_dtype: torch.dtype = torch.float32  # of the projection; later operations use at least fp32
    chunk_elements: int | None = None  # None: by the device

    def plain(self) -> Head:
        """The bare model's head: fp32 throughout, temperature 1, nothing banned."""
        return Head(scale=self.scale, soft_cap=self.soft_cap)


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
    logp = _sampled_from(logits.to(wide, copy=True), targets, early, head).log_softmax(-1)
    each = logp if entropy_learns else logp.detach()
    entropy = -(each.exp() * each).sum(-1)
    return LogProbs(logp=logp.gather(1, targets[:, None])[:, 0], entropy=entropy)


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Head) -> torch.Tensor:
    """[t, V] the model's logits, at least fp32. `weight` and `bias` have dtype `compute_dtype`."""
    projected = hidden.to(head.compute_dtype) @ weight.T
    logits = projected.to(torch.promote_types(head.compute_dtype, torch.float32))
    if bias is not None:
        logits += bias
    if head.scale != 1:
        logits *= head.scale
    if head.soft_cap is not None:
        logits = logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    return logits


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
        matrix, offset = _in_dtype(weight, bias, head)
        for part in _chunks(weight, targets, head):
            logits = _sampled_from(project(hidden[part], matrix, offset, head), targets[part], early[part], head)
            # Few passes over [t, V], and no third one in memory: `logsumexp` would compute another exponential.
            peak = logits.amax(dim=-1)
            logits -= peak[:, None]
            weights = logits.exp()
            mass = weights.sum(dim=-1)
            log_mass = mass.log()
            total[part] = peak + log_mass
            logp[part] = logits.gather(1, targets[part, None])[:, 0] - log_mass
            entropy[part] = log_mass - torch.bmm(weights[:, None], logits[:, :, None])[:, 0, 0] / mass
        ctx.save_for_backward(hidden, weight, bias, targets, early, total, entropy if entropy_learns else None)
        ctx.head = head
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Backpropagate chunk by chunk, recomputing the logits.

        d logp_t / d logits_t = one-hot of the target - p, d entropy_t / d logits_t = -p (log p + entropy_t), with p the
        softmax of the logits; then through cap, scale and projection.
        """
        hidden, weight, bias, targets, early, total, entropy = ctx.saved_tensors
        head: Head = ctx.head
        matrix, offset = _in_dtype(weight, bias, head)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        # At least fp32, even for a bf16 weight: chunks are summed before rounding.
        sums = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sums) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _chunks(weight, targets, head):
            logits = project(hidden[part], matrix, offset, head)
            # d cap tanh(z / cap) / dz = 1 - tanh^2
            slope = None if head.soft_cap is None else 1 - (logits / head.soft_cap).square_()
            logits = _sampled_from(logits, targets[part], early[part], head)
            logits -= total[part, None]
            scale = grads[0][part, None] / head.temperature * head.scale
            of_p = -scale
            if entropy is not None:  # the one case that holds a third [t, V]
                of_p = of_p - (logits + entropy[part, None]) * (grads[1][part, None] / head.temperature * head.scale)
            wide = logits.exp_().mul_(of_p).scatter_add_(1, targets[part, None], scale)
            if slope is not None:
                wide *= slope
            grad = wide.to(head.compute_dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part].to(head.compute_dtype)
            if grad_bias is not None:
                grad_bias += wide.sum(0)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _in_dtype(weight: torch.Tensor, bias: torch.Tensor | None, head: Head) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.to(head.compute_dtype), None if bias is None else bias.to(head.compute_dtype)


def _sampled_from(logits: torch.Tensor, targets: torch.Tensor, early: torch.Tensor, head: Head) -> torch.Tensor:
    """Apply temperature and bans as the engine does before sampling; in place."""
    if head.temperature != 1:
        logits /= head.temperature
    if head.end_ids:
        ends = torch.tensor(head.end_ids, device=logits.device)
        # A response that ended early anyway (another engine, another end token) keeps a finite log-prob.
        logits[:, ends] = logits[:, ends].masked_fill(early[:, None] & (targets[:, None] != ends), _BANNED)
    return logits


def _chunks(weight: torch.Tensor, targets: torch.Tensor, head: Head) -> Iterator[slice]:
    elements = head.chunk_elements or CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cpu"])
    size, num_tokens = max(1, elements // len(weight)), len(targets)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))
