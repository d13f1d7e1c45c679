"""The loop in which every sample is exactly so old, and what is said of its trials."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.staleness import Trials
from bench.staleness_task import Task, Trial, run_trial

SHORT = replace(Task(), num_steps=12, look_every=2, num_looked_at=256)


def rewards(loss: str, *, lag: int, seed: int = 3) -> list[float]:
    return list(run_trial(SHORT, loss=loss, lag=lag, seed=seed).rewards)


def test_a_trial_is_decided_by_its_seed() -> None:
    assert rewards("truncated", lag=2) == rewards("truncated", lag=2)
    assert rewards("truncated", lag=2) != rewards("truncated", lag=2, seed=4)


def test_fresh_samples_teach_the_same_with_and_without_a_correction() -> None:
    assert rewards("truncated", lag=0) == pytest.approx(rewards("none", lag=0), abs=0.02)


def test_stale_samples_do_not() -> None:
    assert rewards("truncated", lag=6) != pytest.approx(rewards("none", lag=6), abs=1e-3)


def test_before_the_first_new_weights_arrive_the_lag_makes_no_difference() -> None:
    """Samples of the first steps come from the first weights, whatever the lag."""
    ages_alike = replace(SHORT, num_steps=4)
    one, other = (run_trial(ages_alike, loss="tis", lag=lag, seed=1).rewards for lag in (4, 50))
    assert one == other


def test_a_policy_that_learns_gets_more() -> None:
    found = run_trial(replace(SHORT, num_steps=100), loss="truncated", lag=1, seed=0).rewards
    assert found[-1] > found[0] + 0.05


def test_shortfalls_are_taken_seed_by_seed() -> None:
    def trial(reward: float) -> Trial:
        return Trial(rewards=[reward], entropy=0.0)

    trials = Trials({("x", 0): [trial(1.0), trial(3.0)], ("x", 8): [trial(0.9), trial(2.9)]})
    short = trials.shortfall("x", 8)
    assert (short.mean, short.error) == (pytest.approx(0.05), pytest.approx(0.0, abs=1e-12))


def test_the_end_of_a_trial_is_its_last_fifth_and_its_unrest_that_of_the_last_third() -> None:
    trial = Trial(rewards=[0.0] * 10 + [1.0, 3.0, 1.0, 1.0, 3.0], entropy=0.0)
    assert trial.final == pytest.approx(5 / 3)
    assert trial.unrest == pytest.approx(float(np.std([1, 3, 1, 1, 3])))
