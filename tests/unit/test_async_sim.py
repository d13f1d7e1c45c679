"""Simulated time: numbers that can be computed by hand, and what must hold whatever is drawn."""

from __future__ import annotations

import pytest

from bench.async_sim import Load, apart, together

# Every response takes 10 s, every step 10 s, and a batch fits the slots of one GPU.
EVEN = Load(
    groups_per_step=4,
    num_samples=2,
    median_tokens=400.0,
    tokens_per_s=40.0,
    spread=0.0,
    reward_median_s=1e-9,
    reward_spread=0.0,
    slots_a_gpu=8,
    trained_per_s=320.0,
    publish_s=0.0,
    switch_s=0.0,
)


def test_in_turns_a_step_takes_generation_and_training() -> None:
    pace = apart(EVEN, generating=1, training=1, lag=0, num_steps=10)
    assert pace.samples_per_s == pytest.approx(8 / 20)
    assert (pace.generating, pace.training, pace.lag_max) == (pytest.approx(0.5), pytest.approx(0.5), 0)
    assert together(EVEN, gpus=1, num_steps=10).samples_per_s == pytest.approx(8 / 20)


def test_one_batch_ahead_both_are_always_at_work() -> None:
    pace = apart(EVEN, generating=1, training=1, lag=1, num_steps=10)
    assert pace.samples_per_s == pytest.approx(8 / 10)
    assert (pace.generating, pace.training) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (pace.lag_mean, pace.lag_max) == (1, 1)


def test_long_responses_hold_up_who_goes_in_turns_and_not_who_goes_ahead() -> None:
    long_tailed = Load(groups_per_step=16)
    paces = [apart(long_tailed, generating=2, training=2, lag=lag, num_steps=30).samples_per_s for lag in (0, 1, 4)]
    assert paces == sorted(paces)
    assert paces[2] > 1.5 * paces[0]


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (apart(Load(groups_per_step=8), generating=1, training=1, lag=2, num_steps=5) for _ in range(2))
    assert one == other
