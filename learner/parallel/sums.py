"""What ranks that share layers add up, on the way there and back, and which tokens each of them has for itself.

Each sum blocks until the group's ranks have come. No GPU has run this, by NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from streamrl.learner.parallel.context import Parts, joined


def total(parts: Parts, part: torch.Tensor) -> torch.Tensor:
    """Of what ranks have made."""
    # torch gives `apply` no types: they are those of `forward`.
    found: torch.Tensor = _Sum.apply(parts.group, part)  # type: ignore[no-untyped-call]
    return found


def entering(parts: Parts, given: Any) -> Any:
    """As it is, with the gradient of all ranks; what has none is as it is."""
    if not isinstance(given, torch.Tensor) or not given.requires_grad:
        return given
    return _Enter.apply(parts.group, given)  # type: ignore[no-untyped-call]


class Turn:
    """The tokens that this rank has for itself where weights are not divided between the ranks of its group, those of
    the head and of experts. Other ranks have the others.

    What they have in common is no part of a layer: its gradient is to be the same on every rank of the group, or a sum
    of as many. So what goes back is as many times as large, and what reaches the hidden states is the mean.
    """

    def __init__(self, parts: Parts, num_tokens: int, device: torch.device) -> None:
        self._parts, self._num = parts, num_tokens
        size = -(-num_tokens // parts.of)
        self.mine = torch.arange(num_tokens, device=device)[parts.at * size : (parts.at + 1) * size]

    def taken(self, whole: torch.Tensor) -> torch.Tensor:  # [T, ...] -> [mine, ...]
        found: torch.Tensor = _Take.apply(self._parts, self.mine, whole)  # type: ignore[no-untyped-call]
        return found

    def told(self, *values: torch.Tensor) -> Sequence[torch.Tensor]:  # [T, ...] of [mine, ...] each
        for value in values:
            if value.requires_grad:
                value.register_hook(self._times)
        return joined(self._parts.group, self.mine, self._num, *values)

    def _times(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self._parts.of


class _Sum(torch.autograd.Function):
    """Of what ranks have made; each has the gradient already."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


class _Enter(torch.autograd.Function):
    """As it is; the gradient is the sum of what ranks have found of it."""

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
    """Some of the tokens; back comes the mean of what ranks have found of theirs."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, mine: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        ctx.parts, ctx.num = parts, len(whole)
        ctx.save_for_backward(mine)
        return whole[mine]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [mine], [own] = ctx.saved_tensors, grads
        gradient = own.new_zeros(ctx.num, *own.shape[1:])
        gradient[mine] = own / ctx.parts.of
        if ctx.num:
            dist.all_reduce(gradient, group=ctx.parts.group)
        return None, None, gradient
