"""The losses for stale samples: numbers computed by hand, a bandit whose gradient is known, and absurd ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from learner.algorithms.base import TokenLosses, Tokens
from learner.algorithms.losses import LOSSES, make_loss
from streamrl.config import schema
from streamrl.config.losses import DEFAULTS

E = math.e


def tokens_of(
    logmu: Sequence[float],
    advantage: Sequence[float],
    *,
    logprox: Sequence[float] | None = None,
    sample: Sequence[int] | None = None,
) -> Tokens:
    """Each token a response of its own, unless told."""
    return Tokens(
        logmu=torch.tensor(logmu, dtype=torch.float64),
        logprox=torch.tensor(logprox if logprox is not None else logmu, dtype=torch.float64),
        logref=None,
        advantage=torch.tensor(advantage, dtype=torch.float64),
        sample=torch.tensor(sample if sample is not None else list(range(len(logmu))), dtype=torch.int64),
        num_samples=len(logmu),
    )


def judge(logpi: Sequence[float], tokens: Tokens, **settings: Any) -> tuple[TokenLosses, list[float]]:
    """(the losses, their gradients by log pi)"""
    at = torch.tensor(logpi, dtype=torch.float64, requires_grad=True)
    losses = make_loss(schema.Algorithm(**settings))(at, tokens)
    [gradient] = torch.autograd.grad(losses.values.sum(), at)
    return losses, gradient.tolist()


def test_every_loss_has_its_limits_by_default_and_a_name_in_the_configuration() -> None:
    assert set(LOSSES) == set(DEFAULTS) == set(schema.Correction.__args__)


def test_truncated_weighs_each_token_by_its_ratio_up_to_the_clamp() -> None:
    losses, gradient = judge([-1, -1, -1], tokens_of([-1, -2, -9], [2, 2, -1]))
    assert losses.values.tolist() == pytest.approx([2, 2 * E, -5])
    assert gradient == pytest.approx([-2, -2 * E, 5])
    assert losses.ratio.tolist() == pytest.approx([1, E, E**8])
    assert losses.clipped.tolist() == [False, False, True]


def test_tis_is_truncated_with_a_tighter_clamp() -> None:
    _, gradient = judge([-1, -1], tokens_of([-1.5, -2], [1, 1]), correction="tis")
    assert gradient == pytest.approx([-math.exp(0.5), -2])


def test_icepop_takes_out_tokens_beyond_its_bounds() -> None:
    losses, gradient = judge([-1, -1, -1], tokens_of([-2, -3, -0.1], [1, 1, 1]), correction="icepop")
    assert losses.values.tolist() == pytest.approx([E, 0, 0])
    assert gradient == pytest.approx([-E, 0, 0])
    assert losses.masked.tolist() == [False, True, True]


def test_sequence_mask_takes_out_responses_whose_geometric_mean_left_the_bounds() -> None:
    # Ratios e and 1/e: mean 1, kept. Ratios e and 1: mean e^0.5, taken out.
    tokens = tokens_of([-2, 0, -2, -1], [1, 1, 1, 1], sample=[0, 0, 1, 1])
    losses, gradient = judge([-1, -1, -1, -1], tokens, correction="sequence_mask")
    assert losses.values.tolist() == pytest.approx([E, 1 / E, 0, 0])
    assert gradient == pytest.approx([-E, -1 / E, 0, 0])
    assert losses.masked.tolist() == [False, False, True, True]


def test_sequence_mask_clamps_the_tokens_of_responses_that_it_keeps() -> None:
    losses, gradient = judge([-1, -9], tokens_of([-9, -1], [1, 1], sample=[0, 0]), correction="sequence_mask")
    assert gradient == pytest.approx([-5, -math.exp(-8)])
    assert losses.clipped.tolist() == [True, False]


def test_gspo_clips_the_geometric_mean_of_a_response() -> None:
    # Geometric means 1.5 (log 2 and log 1.125), 3 and 3; the second is clipped, the third pulls back and is not.
    tokens = tokens_of([-math.log(2), -math.log(1.125), -math.log(3), -math.log(3)], [1, 1, 1, -1], sample=[0, 0, 1, 2])
    losses, gradient = judge([0, 0, 0, 0], tokens, correction="gspo", ratio_bounds=(0.5, 2.0))
    assert losses.values.tolist() == pytest.approx([-1.5, -1.5, -2, 3])
    assert gradient == pytest.approx([-1.5, -1.5, 0, 3])
    assert losses.clipped.tolist() == [False, False, True, False]


def test_ppo_clips_only_what_would_move_further_away() -> None:
    # Ratios 1.1; 2 with either sign; 0.5 with either sign.
    ratios = [1.1, 2, 2, 0.5, 0.5]
    tokens = tokens_of([-math.log(r) for r in ratios], [1, 1, -1, 1, -1])
    losses, gradient = judge([0] * 5, tokens, correction="ppo")
    assert losses.values.tolist() == pytest.approx([-1.1, -1.2, 2, -0.5, 0.8])
    assert gradient == pytest.approx([-1.1, 0, 2, -0.5, 0])
    assert losses.clipped.tolist() == [False, True, False, False, True]


def test_decoupled_corrects_for_age_and_clips_what_the_passes_moved() -> None:
    # pi_p / mu = 2, and 8 which is clamped at 5; pi / pi_p = 1.1, 2, 1.
    logmu, logprox = [-math.log(2), -math.log(2), -math.log(8)], [0.0, 0.0, 0.0]
    tokens = tokens_of(logmu, [1, 1, 1], logprox=logprox)
    losses, gradient = judge([math.log(1.1), math.log(2), 0], tokens, correction="decoupled")
    assert losses.values.tolist() == pytest.approx([-2.2, -2.4, -5])
    assert gradient == pytest.approx([-2.2, 0, -5])
    assert losses.ratio.tolist() == pytest.approx([2.2, 4, 8])
    assert losses.clipped.tolist() == [False, True, True]


def test_plain_reinforce_ignores_the_ratio() -> None:
    losses, gradient = judge([-1, -1], tokens_of([-1, -9], [1, -2]), correction="none")
    assert losses.values.tolist() == pytest.approx([1, -2])
    assert gradient == pytest.approx([-1, 2])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_absurd_ratio_stays_finite(name: str, dtype: torch.dtype) -> None:
    logpi = torch.tensor([0.0, -1e9, -1.0, -1.0], dtype=dtype, requires_grad=True)
    tokens = Tokens(
        logmu=torch.tensor([-1e9, 0.0, -30.0, -1.0], dtype=dtype),
        logprox=torch.tensor([-1e9, 0.0, -1.0, -30.0], dtype=dtype),
        logref=None,
        advantage=torch.tensor([0.0, 1.0, -1.0, 1.0], dtype=dtype),
        sample=torch.tensor([0, 1, 2, 2]),
        num_samples=3,
    )
    losses = make_loss(schema.Algorithm(correction=name))(logpi, tokens)
    losses.values.sum().backward()
    for found in (losses.values, losses.ratio, losses.ratio**2, losses.weight, logpi.grad):
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_no_losses(name: str) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    losses = make_loss(schema.Algorithm(correction=name))(nothing, tokens_of([], []))
    assert len(losses.values) == 0


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


def gradients_of_stale_draws(staleness: float, **settings: Any) -> torch.Tensor:  # [draws, arms]
    generator = torch.Generator().manual_seed(7)
    old = old_policy(staleness).log_softmax(0)
    arms = torch.multinomial(old.exp(), DRAWS, replacement=True, generator=generator)
    logpi = YOUNG.log_softmax(0)[arms].requires_grad_()
    tokens = Tokens(
        logmu=old[arms],
        logprox=logpi.detach(),
        logref=None,
        advantage=WORTH[arms],
        sample=torch.arange(DRAWS),
        num_samples=DRAWS,
    )
    losses = make_loss(schema.Algorithm(**settings))(logpi, tokens)
    [by_logpi] = torch.autograd.grad(losses.values.sum(), logpi)
    score = torch.nn.functional.one_hot(arms, len(WORTH)) - YOUNG.softmax(0)
    return by_logpi[:, None] * score


def errors_in_standard_errors(draws: torch.Tensor) -> torch.Tensor:  # [arms]
    return (draws.mean(0) - exact_gradient()).abs() / (draws.std(0) / math.sqrt(len(draws)))


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "truncated"},
        {"correction": "tis", "ratio_clamp": 5.0},
        {"correction": "decoupled"},
        {"correction": "icepop", "ratio_bounds": (0.1, 5.0)},
        {"correction": "sequence_mask", "ratio_bounds": (0.1, 5.0)},
        {"correction": "ppo", "ratio_bounds": (0.1, 5.0)},
        {"correction": "gspo", "ratio_bounds": (0.1, 5.0)},
    ],
    ids=str,
)
def test_corrected_gradients_of_stale_draws_are_those_of_todays_policy(settings: dict[str, Any]) -> None:
    ratios = torch.exp(YOUNG.log_softmax(0) - old_policy(1.0).log_softmax(0))
    assert 0.1 < ratios.min() < 0.7 < 1.4 < ratios.max() < 5, "stale, and within the limits"
    assert errors_in_standard_errors(gradients_of_stale_draws(1.0, **settings)).max() < 3


@pytest.mark.parametrize("settings", [{"correction": "none"}, *({"correction": n} for n in ("ppo", "gspo", "icepop"))])
def test_uncorrected_gradients_are_not_and_bounds_that_bind_are_biased_by_construction(
    settings: dict[str, Any],
) -> None:
    staleness = 3.0 if settings["correction"] == "icepop" else 1.0
    assert errors_in_standard_errors(gradients_of_stale_draws(staleness, **settings)).max() > 10


@pytest.mark.parametrize("name", LOSSES)
def test_fresh_draws_give_the_gradient_of_todays_policy_with_every_loss(name: str) -> None:
    assert errors_in_standard_errors(gradients_of_stale_draws(0.0, correction=name)).max() < 3
