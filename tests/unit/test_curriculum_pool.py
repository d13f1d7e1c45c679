"""What a curriculum holds of each prompt, and how likely it is to be asked next."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.learner.groups.pool import Pool
from tests.curriculum_world import HALF, NUM_PROMPTS, NUM_SAMPLES


def test_rewards_that_always_differ_leave_the_order_as_it_is() -> None:
    pool, chance = Pool([""] * NUM_PROMPTS, num_samples=NUM_SAMPLES), np.random.default_rng(0)
    for row in range(NUM_PROMPTS):
        pool.observe(row, chance.normal(size=NUM_SAMPLES).tolist(), at=0, informative=True)
    pool.refit()
    assert pool.admission(0).min() > 0.99


def test_rewards_that_differ_in_their_last_bit_are_one_reward() -> None:
    pool = Pool([""] * 4, num_samples=4)
    for row, rewards in enumerate([(0.1 + 0.2, 0.3, 0.3, 1.0), (0.3, 0.3, 0.3, 1.0), (0.0, 0.3, 0.3, 1.0)]):
        pool.observe(row, rewards, at=0, informative=True)
    pool.refit()
    rounded, exact, another, _ = pool.admission(1)
    assert rounded == exact < another


def test_a_dataset_that_nobody_can_solve_waits_though_its_prompts_were_not_all_asked() -> None:
    pool = Pool(["hard"] * 100 + ["fit"] * 100, num_samples=NUM_SAMPLES)
    for row in range(40):
        pool.observe(row, (0.0,) * NUM_SAMPLES, at=0, informative=False)
        pool.observe(100 + row, HALF, at=0, informative=True)
    pool.refit()
    assert pool.admission(0)[99] < 0.1
    assert pool.admission(0)[199] > 0.9


def test_new_prompts_of_an_easy_dataset_are_compared_with_those_that_are_known_to_fit() -> None:
    """And not with what is expected of another new prompt alone: that falls as the model gets better."""
    pool, solved = Pool(["easy"] * 100 + ["fit"] * 40, num_samples=NUM_SAMPLES), (1.0,) * NUM_SAMPLES
    for row in range(40):
        pool.observe(row, HALF if row % 5 == 0 else solved, at=0, informative=row % 5 == 0)
        pool.observe(100 + row, HALF if row % 2 else solved, at=0, informative=row % 2 == 1)
    pool.refit()
    assert 0.05 < pool.admission(0)[99] < 0.25
    assert pool.admission(0)[101] > 0.9


def test_what_was_observed_does_not_depend_on_the_order_in_which_groups_ended() -> None:
    seen = [(row % 10, HALF if row % 3 else (1.0,) * NUM_SAMPLES, row // 10) for row in range(60)]
    found = []
    for order in (seen, sorted(seen, key=lambda one: (one[2] // 2, one[0], one[2]))):
        pool = Pool([""] * 60, num_samples=NUM_SAMPLES)
        for row, rewards, at in order:
            pool.observe(row, rewards, at=at, informative=len(set(rewards)) > 1)
        found.append(pool.admission(6))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_prompts_that_never_teach_anything_are_asked_all_the_same() -> None:
    pool = Pool([""] * 20, num_samples=NUM_SAMPLES)
    for row in [*range(20)] * 50:
        pool.observe(row, (1.0,) * NUM_SAMPLES, at=0, informative=False)
    pool.refit()
    assert pool.admission(0).min() > 0.9, "one is as good as another"
    assert pool.census(0) == {"new": 0, "fitting": 0, "solved": 20, "hopeless": 0}
