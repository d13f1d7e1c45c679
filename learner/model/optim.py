"""AdamW, its learning rate, and the guard before it: nothing non-finite ever reaches the weights.

gradient norm and loss, over all ranks --> finite? --no--> all ranks skip together, counted
                                             | yes
                                             v
                             clip to clip_norm --> AdamW at lr(step)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from streamrl.config import schema
from streamrl.learner.process.ranks import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    applied: bool  # False: the loss or the gradient was not finite, and nothing changed
    loss: float  # over all ranks
    grad_norm: float  # before clipping
    lr: float


def make_optimizer(policy: nn.Module, settings: schema.Optimizer) -> torch.optim.AdamW:
    """Matrices decay; norms and biases do not."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps)


def learning_rate(step: int, settings: schema.Optimizer, *, total_steps: int | None) -> float:
    """Of the step after `step` made ones: linear warm-up, half a cosine to min_lr, then constant_steps at min_lr.

    A run too short for its constant tail has none; one without a known end stays at lr.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant" or total_steps is None:
        return settings.lr
    decay_steps = total_steps - settings.warmup_steps - settings.constant_steps
    if decay_steps <= 0:
        decay_steps = max(1, total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / decay_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def update(optimizer: torch.optim.Optimizer, *, loss: float, lr: float, clip_norm: float, world: World) -> Update:
    """One step from the gradients that lie in the parameters; they are gone afterwards. `loss` is this rank's share."""
    gradients = [_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    squares, total_loss = world.total(np.array([_sum_of_squares(gradients), loss]))
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    applied = math.isfinite(norm) and math.isfinite(total_loss)
    if applied:
        if 0 < clip_norm < norm:
            torch._foreach_mul_(gradients, clip_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(applied=applied, loss=float(total_loss), grad_norm=norm, lr=lr)


def _sum_of_squares(gradients: Iterable[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(gradients)).double() ** 2)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
