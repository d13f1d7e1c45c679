"""Sums over ranks that share layers, forward and backward, and each rank's share of the tokens.

Each sum blocks until the group's ranks have joined. No GPU has run this, by NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from streamrl.learner.parallel.context import Sharers, joined


def total(sharers: Sharers, part: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' parts."""
    # torch leaves `apply` untyped: its types are those of `forward`.
    found: torch.Tensor = _Sum.apply(sharers.group, part)  # type: ignore[no-untyped-call]
    return found


def entering(sharers: Sharers, given: Any) -> Any:
    """`given` unchanged, with its gradient summed over ranks; values without gradient pass through."""
    if not isinstance(given, torch.Tensor) or not given.requires_grad:
        return given
    return _Enter.apply(sharers.group, given)  # type: ignore[no-untyped-call]


class TokenShare:
    """This rank's share of the tokens for modules whose weights are not divided within its group: head and experts.

    Other ranks have the other tokens. Such weights are in no divided layer: their gradient must be the same on every
    rank of the group, or a sum over all of them. So gradients are scaled by the group's size going in, and averaged
    going out to the hidden states.
    """

    def __init__(self, sharers: Sharers, num_tokens: int, device: torch.device) -> None:
        self._sharers, self._num = sharers, num_tokens
        size = -(-num_tokens // sharers.of)
        self.own_tokens = torch.arange(num_tokens, device=device)[sharers.at * size : (sharers.at + 1) * size]

    def taken(self, whole: torch.Tensor) -> torch.Tensor:  # [T, ...] -> [own tokens, ...]
        found: torch.Tensor = _Take.apply(self._sharers, self.own_tokens, whole)  # type: ignore[no-untyped-call]
        return found

    def gathered(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:  # [T, ...] of [own tokens, ...] each
        for value in values:
            if value.requires_grad:
                value.register_hook(self._times)
        return joined(self._sharers.group, self.own_tokens, self._num, *values)

    def _times(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self._sharers.of


class _Sum(torch.autograd.Function):
    """The sum of the ranks' parts; each rank already has the full gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


class _Enter(torch.autograd.Function):
    """The identity; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, whole: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [part] = grads
        gradient = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return None, gradient


class _Take(torch.autograd.Function):
    """Some of the tokens; the gradient is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, sharers: Sharers, own_tokens: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        ctx.sharers, ctx.num = sharers, len(whole)
        ctx.save_for_backward(own_tokens)
        return whole[own_tokens]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [own_tokens], [own] = ctx.saved_tensors, grads
        gradient = own.new_zeros(ctx.num, *own.shape[1:])
        gradient[own_tokens] = own / ctx.sharers.of
        if ctx.num:
            dist.all_reduce(gradient, group=ctx.sharers.group)
        return None, None, gradient
