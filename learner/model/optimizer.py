"""AdamW over what trains, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from streamrl.config import schema


def make_optimizer(policy: nn.Module, settings: schema.Optimizer) -> torch.optim.AdamW:
    """Matrices decay; norms and biases do not, nor do the biases of stacked experts."""
    groups: dict[tuple[bool, Hashable], list[nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and not name.endswith("bias")
            groups.setdefault((decays, _mesh(parameter)), []).append(parameter)
    # One kernel that takes no memory of its own; where there is a GPU, also for masters that wait on its host.
    fused = True if torch.cuda.is_available() else None
    return torch.optim.AdamW(
        [
            {"params": own, "weight_decay": settings.weight_decay if decays else 0.0}
            for (decays, _), own in sorted(groups.items(), key=lambda group: not group[0][0])
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=fused,
    )


def _mesh(parameter: torch.Tensor) -> Hashable:
    """Experts that are divided over ranks lie on a mesh of their own, and one kernel takes tensors of one mesh."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


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
