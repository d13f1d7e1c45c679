"""The losses for stale samples: numbers computed by hand, a bandit whose gradient is known, and absurd ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from streamrl.recipe.losses import LOSSES, TokenBatch, ratios

E = math.e


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    values: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor
    clipped: torch.Tensor
    masked: torch.Tensor
    gradient: list[float]  # of the values' sum, by log pi


def judge(
    logprobs: Sequence[float],
    behaviour: Sequence[float],
    advantages: Sequence[float],
    *,
    loss: str = "truncated",
    proximal: Sequence[float] | None = None,
    sample: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **arguments: float,
) -> Judged:
    """Each token a response of its own, unless told."""
    at = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    batch = TokenBatch(
        logprobs=at,
        behaviour_logprobs=torch.tensor(behaviour, dtype=dtype),
        proximal_logprobs=torch.tensor(proximal if proximal is not None else behaviour, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        staleness=torch.zeros(len(at), dtype=torch.int64),
        sample=torch.tensor(sample if sample is not None else list(range(len(at))), dtype=torch.int64),
        num_samples=len(at),
    )
    values, metrics = LOSSES[loss](batch, **arguments)
    [gradient] = torch.autograd.grad(values.sum(), at)
    none = torch.zeros(len(at), dtype=torch.bool)
    return Judged(
        values=values,
        ratio=ratios(at.detach(), batch.behaviour_logprobs),
        weight=metrics.get("weight", torch.ones(len(at))),
        clipped=metrics.get("clipped", none),
        masked=metrics.get("masked", none),
        gradient=gradient.tolist(),
    )


def test_truncated_weighs_each_token_by_its_ratio_up_to_the_clamp() -> None:
    losses = judge([-1, -1, -1], [-1, -2, -9], [2, 2, -1])
    assert losses.values.tolist() == pytest.approx([2, 2 * E, -5])
    assert losses.gradient == pytest.approx([-2, -2 * E, 5])
    assert losses.ratio.tolist() == pytest.approx([1, E, E**8])
    assert losses.clipped.tolist() == [False, False, True]


def test_tis_is_truncated_with_a_tighter_clamp() -> None:
    losses = judge([-1, -1], [-1.5, -2], [1, 1], loss="tis")
    assert losses.gradient == pytest.approx([-math.exp(0.5), -2])


def test_icepop_takes_out_tokens_beyond_its_bounds() -> None:
    losses = judge([-1, -1, -1], [-2, -3, -0.1], [1, 1, 1], loss="icepop", proximal=[-1, -1, -1])
    assert losses.values.tolist() == pytest.approx([-E, 0, 0])
    assert losses.gradient == pytest.approx([-E, 0, 0])
    assert losses.masked.tolist() == [False, True, True]


def test_icepop_clips_what_the_passes_over_a_batch_moved() -> None:
    losses = judge([-1, -1], [-3, -2], [1, 1], loss="icepop", proximal=[-2, -1.1], high=3.0)
    assert losses.values.tolist() == pytest.approx([-E * 1.2, -math.exp(0.9) * math.exp(0.1)])
    assert losses.gradient == pytest.approx([0, -math.exp(0.9) * math.exp(0.1)])
    assert losses.clipped.tolist() == [True, False]


def test_sequence_mask_takes_out_responses_whose_geometric_mean_left_the_bounds() -> None:
    # Ratios e and 1/e: mean 1, kept. Ratios e and 1: mean e^0.5, taken out.
    losses = judge([-1] * 4, [-2, 0, -2, -1], [1] * 4, sample=[0, 0, 1, 1], loss="sequence_mask")
    assert losses.values.tolist() == pytest.approx([E, 1 / E, 0, 0])
    assert losses.gradient == pytest.approx([-E, -1 / E, 0, 0])
    assert losses.masked.tolist() == [False, False, True, True]


def test_sequence_mask_clamps_the_tokens_of_responses_that_it_keeps() -> None:
    losses = judge([-1, -9], [-9, -1], [1, 1], sample=[0, 0], loss="sequence_mask")
    assert losses.gradient == pytest.approx([-5, -math.exp(-8)])
    assert losses.clipped.tolist() == [True, False]


def test_gspo_clips_the_geometric_mean_of_a_response() -> None:
    # Geometric means 1.5 (log 2 and log 1.125), 3 and 3; the second is clipped, the third pulls back and is not.
    behaviour = [-math.log(2), -math.log(1.125), -math.log(3), -math.log(3)]
    losses = judge([0] * 4, behaviour, [1, 1, 1, -1], sample=[0, 0, 1, 2], loss="gspo", low=0.5, high=2.0)
    assert losses.values.tolist() == pytest.approx([-1.5, -1.5, -2, 3])
    assert losses.gradient == pytest.approx([-1.5, -1.5, 0, 3])
    assert losses.clipped.tolist() == [False, False, True, False]


def test_ppo_clips_only_what_would_move_further_away() -> None:
    # Ratios 1.1; 2 with either sign; 0.5 with either sign.
    behaviour = [-math.log(ratio) for ratio in (1.1, 2, 2, 0.5, 0.5)]
    losses = judge([0] * 5, behaviour, [1, 1, -1, 1, -1], loss="ppo")
    assert losses.values.tolist() == pytest.approx([-1.1, -1.2, 2, -0.5, 0.8])
    assert losses.gradient == pytest.approx([-1.1, 0, 2, -0.5, 0])
    assert losses.clipped.tolist() == [False, True, False, False, True]


def test_decoupled_corrects_for_age_and_clips_what_the_passes_moved() -> None:
    # pi_p / mu = 2, and 8 which is clamped at 5; pi / pi_p = 1.1, 2, 1.
    behaviour = [-math.log(2), -math.log(2), -math.log(8)]
    losses = judge([math.log(1.1), math.log(2), 0], behaviour, [1] * 3, proximal=[0.0] * 3, loss="decoupled")
    assert losses.values.tolist() == pytest.approx([-2.2, -2.4, -5])
    assert losses.gradient == pytest.approx([-2.2, 0, -5])
    assert losses.ratio.tolist() == pytest.approx([2.2, 4, 8])
    assert losses.clipped.tolist() == [False, True, True]


def test_plain_reinforce_ignores_the_ratio() -> None:
    losses = judge([-1, -1], [-1, -9], [1, -2], loss="none")
    assert losses.values.tolist() == pytest.approx([1, -2])
    assert losses.gradient == pytest.approx([-1, 2])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_absurd_ratio_stays_finite(name: str, dtype: torch.dtype) -> None:
    losses = judge(
        [0.0, -1e9, -1.0, -1.0],
        [-1e9, 0.0, -30.0, -1.0],
        [0.0, 1.0, -1.0, 1.0],
        proximal=[-1e9, 0.0, -1.0, -30.0],
        sample=[0, 1, 2, 2],
        loss=name,
        dtype=dtype,
    )
    for found in (losses.values, losses.ratio, losses.ratio**2, losses.weight, torch.tensor(losses.gradient)):
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_no_losses(name: str) -> None:
    assert len(judge([], [], [], loss=name).values) == 0


# A bandit: one token a response, five arms, and rewards such that some arms are worth more than others.

WORTH = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.6], dtype=torch.float64)
YOUNG = torch.tensor([0.4, -0.3, 0.0, 0.2, -0.2], dtype=torch.float64)
DRAWS = 50_000


def old_policy(staleness: float) -> torch.Tensor:
    return YOUNG + staleness * torch.tensor([-1.0, 0.6, 0.5, -0.7, 0.9], dtype=torch.float64)


def exact_gradient() -> torch.Tensor:  # [arms] of the expected worth under today's policy, negated
    theta = YOUNG.clone().requires_grad_()
    [gradient] = torch.autograd.grad(-(theta.softmax(0) * WORTH).sum(), theta)
    return gradient


def gradients_of_stale_draws(staleness: float, *, loss: str, **arguments: float) -> torch.Tensor:  # [draws, arms]
    generator = torch.Generator().manual_seed(7)
    old = old_policy(staleness).log_softmax(0)
    arms = torch.multinomial(old.exp(), DRAWS, replacement=True, generator=generator)
    logprobs = YOUNG.log_softmax(0)[arms].requires_grad_()
    batch = TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=old[arms],
        proximal_logprobs=logprobs.detach(),
        advantages=WORTH[arms],
        staleness=torch.zeros(DRAWS, dtype=torch.int64),
        sample=torch.arange(DRAWS),
        num_samples=DRAWS,
    )
    values, _ = LOSSES[loss](batch, **arguments)
    [by_logprobs] = torch.autograd.grad(values.sum(), logprobs)
    score = torch.nn.functional.one_hot(arms, len(WORTH)) - YOUNG.softmax(0)
    return by_logprobs[:, None] * score


def errors_in_standard_errors(draws: torch.Tensor) -> torch.Tensor:  # [arms]
    return (draws.mean(0) - exact_gradient()).abs() / (draws.std(0) / math.sqrt(len(draws)))


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "truncated"},
        {"loss": "tis", "clamp": 5.0},
        {"loss": "decoupled"},
        {"loss": "icepop", "low": 0.1, "high": 5.0},
        {"loss": "sequence_mask", "low": 0.1, "high": 5.0},
        {"loss": "ppo", "low": 0.1, "high": 5.0},
        {"loss": "gspo", "low": 0.1, "high": 5.0},
    ],
    ids=str,
)
def test_corrected_gradients_of_stale_draws_are_those_of_todays_policy(settings: dict[str, Any]) -> None:
    ratios = torch.exp(YOUNG.log_softmax(0) - old_policy(1.0).log_softmax(0))
    assert 0.1 < ratios.min() < 0.7 < 1.4 < ratios.max() < 5, "stale, and within the limits"
    assert errors_in_standard_errors(gradients_of_stale_draws(1.0, **settings)).max() < 3


@pytest.mark.parametrize("settings", [{"loss": "none"}, *({"loss": n} for n in ("ppo", "gspo", "icepop"))])
def test_uncorrected_gradients_are_not_and_bounds_that_bind_are_biased_by_construction(
    settings: dict[str, Any],
) -> None:
    staleness = 3.0 if settings["loss"] == "icepop" else 1.0
    assert errors_in_standard_errors(gradients_of_stale_draws(staleness, **settings)).max() > 10


@pytest.mark.parametrize("name", LOSSES)
def test_fresh_draws_give_the_gradient_of_todays_policy_with_every_loss(name: str) -> None:
    assert errors_in_standard_errors(gradients_of_stale_draws(0.0, loss=name)).max() < 3
