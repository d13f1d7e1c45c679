from __future__ import annotations

import pytest

from streamrl.errors import TrainingError
from streamrl.learner.groups.plan import Kind
from tests.feed_world import FeedWorld, make_config

RAISED = "2 of 2 samples failed: reward 'mine': KeyError: 'anser' (mine.py:3)"


def make_world(*, limit: int = 6, num_prompts: int = 40) -> FeedWorld:
    return FeedWorld(make_config(training={"max_failed_in_row": limit}), num_prompts=num_prompts)


def fail_all(world: FeedWorld, error: str = RAISED) -> None:
    for number in sorted(world.tickets()):
        world.fail(number, error)


def test_a_run_whose_groups_all_fail_stops_and_says_why_with_an_example() -> None:
    world = make_world()
    world.plan(timeout_s=5.0)
    fail_all(world)
    assert world.plan(timeout_s=5.0) is None, "4 failures are fewer than 6"
    fail_all(world)
    with pytest.raises(TrainingError) as told:
        world.plan(timeout_s=5.0)
    assert "6 groups in a row failed" in str(told.value)
    assert "training.max_failed_in_row" in str(told.value)
    assert RAISED in str(told.value)
    assert "prompt '" in str(told.value)
    assert world.feed.metrics()["stream/dead"] == 0, "nothing is lost by then"


def test_a_sound_group_between_failures_lets_the_run_go_on() -> None:
    world = make_world()
    world.plan(timeout_s=5.0)
    for _ in range(3):
        first, *others = sorted(world.tickets())
        for number in others:
            world.fail(number, RAISED)
        world.answer(first)
        plan = world.plan(timeout_s=5.0)
        if plan is not None and plan.kind is Kind.STEP:
            world.train(plan)
            world.plan(timeout_s=5.0)


def test_after_a_stop_the_next_learner_asks_for_the_same_tickets_again() -> None:
    world = make_world()
    world.plan(timeout_s=5.0)
    fail_all(world)
    world.plan(timeout_s=5.0)
    fail_all(world)
    with pytest.raises(TrainingError):
        world.plan(timeout_s=5.0)
    world.start()
    assert len(world.run_to_end()) == 40


def test_data_that_end_without_a_step_are_no_success_and_can_be_tried_again() -> None:
    world = make_world(limit=100, num_prompts=3)
    for _ in range(4):  # the first plan, and one for each attempt
        plan = world.plan(timeout_s=5.0)
        fail_all(world)
    assert plan is not None
    assert plan.kind is Kind.END
    with pytest.raises(TrainingError) as told:
        world.feed.check_trained()
    assert "no step was made: of 3 groups 3 failed for good" in str(told.value)
    assert RAISED in str(told.value)
    world.start()
    assert len(world.run_to_end()) == 3
    world.feed.check_trained()


def test_data_of_which_every_group_is_dropped_are_no_success() -> None:
    world = make_world(num_prompts=3)
    world.plan(timeout_s=5.0)
    for number in sorted(world.tickets()):
        world.answer(number, rewards=(1.0, 1.0))
    world.plan(timeout_s=5.0)
    with pytest.raises(TrainingError, match="of 3 groups 3 dropped as zero_variance"):
        world.feed.check_trained()
