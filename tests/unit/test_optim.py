"""The optimizer's step: rate, clipping, decay, and the guard."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from streamrl.config import schema
from streamrl.learner.objective.optimizer import Update, learning_rate, make_optimizer, update
from streamrl.learner.process.ranks import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def take_step(module: nn.Module, gradient: float, *, loss: float = 1.0, clip_norm: float = 0.0) -> Update:
    optimizer = make_optimizer(module, schema.Optimizer(lr=0.1, weight_decay=0.0))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    return update(optimizer, loss=loss, lr=0.1, clip_norm=clip_norm, world=ALONE)


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_gradient_or_loss_that_is_not_finite_changes_nothing(gradient: float, loss: float) -> None:
    module = nn.Linear(3, 2)
    before = [p.detach().clone() for p in module.parameters()]
    result = take_step(module, gradient, loss=loss)
    assert not result.applied
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert all(p.grad is None for p in module.parameters())


def test_the_norm_is_measured_before_clipping_and_the_step_is_made() -> None:
    module = nn.Linear(3, 2, bias=False)
    before = module.weight.detach().clone()
    result = take_step(module, 2.0, clip_norm=1.0)
    assert result.applied
    assert result.grad_norm == pytest.approx(2.0 * math.sqrt(6))
    assert not torch.equal(module.weight, before)


def test_clipping_scales_the_gradient_to_the_norm() -> None:
    module = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = module.weight.detach().clone()
    module.weight.grad = torch.full_like(module.weight, 3.0)
    update(optimizer, loss=0.0, lr=1.0, clip_norm=1.0, world=ALONE)
    torch.testing.assert_close(before - module.weight.detach(), torch.full_like(before, 0.5))


def test_only_matrices_decay() -> None:
    optimizer = make_optimizer(nn.Linear(3, 2), schema.Optimizer(weight_decay=0.3))
    decays = {tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {(2, 3): 0.3, (2,): 0.0}


def test_the_rate_warms_up_falls_as_a_cosine_and_ends_constant() -> None:
    settings = schema.Optimizer(lr=1.0, min_lr=0.1, warmup_steps=10, constant_steps=20)
    rates = [learning_rate(step, settings, total_steps=110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[50] == pytest.approx(0.55)
    assert rates[90] == rates[109] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_run_too_short_for_its_constant_tail_still_falls_to_the_end() -> None:
    settings = schema.Optimizer(lr=1.0, min_lr=0.1, warmup_steps=10, constant_steps=1000)
    assert learning_rate(60, settings, total_steps=110) == pytest.approx(0.55)


def test_a_run_that_ends_sooner_than_its_steps_falls_by_how_far_it_is_and_warms_up_by_steps() -> None:
    settings = schema.Optimizer(lr=1.0, min_lr=0.1, warmup_steps=10, constant_steps=20)
    rates = [learning_rate(step, settings, total_steps=110, position=2.0 * step) for step in range(55)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[4] == pytest.approx(0.5)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[25] == pytest.approx(0.55)
    assert rates[45] == rates[54] == pytest.approx(0.1)


def test_a_constant_schedule_and_a_run_without_end_stay_at_the_rate() -> None:
    constant = schema.Optimizer(lr=1.0, schedule="constant", warmup_steps=0)
    assert learning_rate(500, constant, total_steps=100) == 1.0
    assert learning_rate(500, schema.Optimizer(lr=1.0), total_steps=None) == 1.0
