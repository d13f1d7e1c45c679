"""AdamW over the trainable parameters, the learning rate schedule, and the guarded update step.

    gradient norm and loss, over all ranks ─► finite? ── no ─► all ranks skip together, counted
        │ yes
    clip to clip_norm ─► AdamW at lr(step)              nothing non-finite ever reaches the weights

Collectives: norm and loss; each blocks until every rank has joined.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from streamrl.config import schema
from streamrl.learner.parallel.dtensors import is_copy, local
from streamrl.learner.process.ranks import World


def make_optimizer(policy: nn.Module, settings: schema.Optimizer) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norms, biases or the biases of stacked experts."""
    groups: dict[tuple[bool, Hashable], list[nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and not name.endswith("bias")
            groups.setdefault((decays, _mesh(parameter)), []).append(parameter)
    # One kernel without temporary memory; with a GPU present, also for master weights offloaded to the host.
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
    """The parameter's mesh: sharded experts have their own, and one fused kernel takes tensors of one mesh."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def learning_rate(
    step: int, settings: schema.Optimizer, *, total_steps: int | None, position: float | None = None
) -> float:
    """The learning rate of the step after `step` completed ones.

    Linear warm-up, half a cosine to min_lr, then constant_steps at min_lr. A run too short for its constant tail has
    none; one without a known end stays at lr. `position`: how far the run is on its way to `total_steps`, if its end
    comes sooner than that many steps; the warm-up counts steps all the same.
    """
    warmth = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    return warmth * _cooled(step if position is None else position, settings, total_steps)


def _cooled(position: float, settings: schema.Optimizer, total_steps: int | None) -> float:
    """The learning rate without its warm-up."""
    if settings.schedule == "constant" or total_steps is None:
        return settings.lr
    decay_steps = total_steps - settings.warmup_steps - settings.constant_steps
    if decay_steps <= 0:
        decay_steps = max(1, total_steps - settings.warmup_steps)
    done = min(1.0, max(0.0, position - settings.warmup_steps) / decay_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    applied: bool  # False: the loss or the gradient was not finite, and nothing changed
    loss: float  # over all ranks
    grad_norm: float  # before clipping
    lr: float


def update(optimizer: torch.optim.Optimizer, *, loss: float, lr: float, clip_norm: float, world: World) -> Update:
    """Make one step from the parameters' gradients, then clear them. `loss` is this rank's share."""
    own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [local(gradient) for gradient in own]
    [squares] = world.total(np.array([_squares(own)]))
    [total_loss] = world.total_of_data(np.array([loss]))
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


def _squares(gradients: Sequence[torch.Tensor]) -> float:
    """This rank's share of the squared norm; a replica's copies add nothing, but NaN if they are not finite."""
    counted = [local(gradient) for gradient in gradients if not is_copy(gradient)]
    copies = [local(gradient) for gradient in gradients if is_copy(gradient)]
    squares, of_copies = (float(torch.nn.utils.get_total_norm(some).double() ** 2) for some in (counted, copies))
    return squares if math.isfinite(of_copies) else math.nan
