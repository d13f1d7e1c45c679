"""`lag.stale: wait`: a true bound on lag, by timing alone; and what it costs is bounded and shown."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.learner.groups.plan import Kind
from streamrl.telemetry.progress import Wait
from tests.feed_world import FeedWorld, make_config, planned


def waiting_config(**lag: Any) -> Any:
    return make_config(lag={"max_steps": 1, "stale": "wait", **lag}, training={"groups_per_step": 2})


def test_a_full_batch_waits_for_a_ticket_that_would_be_too_old_after_the_step() -> None:
    world = FeedWorld(waiting_config())
    world.plan()
    for number in (1, 2):
        world.answer(number)
    plan = step_of(world)
    assert planned(plan) == [1, 2], "0 and 3 can still be trained in the next step"
    world.train(plan)
    world.plan()
    assert sorted(world.tickets()) == [0, 3, 4, 5]
    for number in (4, 5, 3):
        world.answer(number)
    assert world.plan() is None
    assert world.feed.waits_for is Wait.STRAGGLERS
    world.answer(0)
    assert planned(world.plan()) == [3, 0], "the most urgent first, and then as they came"


def test_the_first_tickets_are_not_put_off_until_there_are_too_many_for_one_step() -> None:
    world = FeedWorld(waiting_config(max_steps=2))
    world.plan()
    assert sorted(world.tickets()) == list(range(6)), "all of them must be trained within three steps"
    for number in (0, 1):
        world.answer(number)
    world.train(step_of(world))
    world.plan()
    for number in (6, 7, 2):  # 6 and 7 have time
        world.answer(number)
    assert world.plan() is None, "a step without two of 2, 3, 4 and 5 leaves three or four for the one that follows"
    world.answer(5)
    assert planned(world.plan()) == [2, 5]


@settings(max_examples=60)
@given(
    groups_per_step=st.integers(1, 4),
    max_steps=st.integers(0, 4),
    data=st.data(),
    seed=st.integers(0, 1 << 32),
)
def test_nothing_older_than_the_bound_is_trained_whatever_the_order_of_the_answers(
    groups_per_step: int, max_steps: int, data: st.DataObject, seed: int
) -> None:
    publish_every = data.draw(st.integers(1, max_steps + 1))
    config = make_config(
        training={"groups_per_step": groups_per_step, "max_epochs": 10},
        lag={"max_steps": max_steps, "stale": "wait", "wait_s": 1e9},
        learner={"idle_timeout_s": 1e9},
    )
    world, rng, trained = FeedWorld(config, num_prompts=5), random.Random(seed), 0
    publish = world.publish
    world.publish = lambda: publish() if world.step % publish_every == 0 else None  # type: ignore[method-assign]
    for _ in range(2000):
        plan = world.plan()
        if plan is not None and plan.kind is Kind.END:
            break
        if plan is not None:
            assert max(world.lags(plan)) <= max_steps
            trained += len(plan.entries)
            world.train(plan)
        elif waiting := sorted(world.tickets()):  # long answers are as frequent as in life: a few take for ever
            place = min(int(rng.paretovariate(0.5)), len(waiting)) - 1
            world.answer(waiting[-1 - place] if rng.random() < 0.5 else rng.choice(waiting))
    assert trained == 50, world.feed.metrics()
    assert "stream/dropped/stale" not in world.feed.metrics()


def straggling(*, wait_s: float) -> FeedWorld:
    """A full batch in hand, 4 and 5, after a step of 1 and 2; 0 and 3 would be too old if it were made without them."""
    world = FeedWorld(waiting_config(wait_s=wait_s))
    world.plan()
    for number in (1, 2):
        world.answer(number)
    world.train(step_of(world))
    world.plan()
    for number in (4, 5):
        world.answer(number)
    return world


def test_stragglers_are_awaited_for_a_bounded_time_and_the_wait_is_counted() -> None:
    world = straggling(wait_s=30.0)
    assert world.plan(timeout_s=20.0) is None
    plan = world.plan(timeout_s=20.0)
    assert planned(plan) == [4, 5]
    assert 29.0 <= world.feed.metrics()["stream/straggler_wait_s"] <= 31.0
    assert plan is not None
    world.train(plan)
    world.answer(0)
    world.answer(3)
    world.plan()
    metrics = world.feed.metrics()
    assert metrics["stream/dropped/stale"] == 2, "past the bound they are not trained"
    assert metrics["stream/drop_rate_by_length/128"] == pytest.approx(2 / 6)


def test_a_straggler_that_never_comes_holds_a_step_up_no_longer_though_redis_is_looked_at_meanwhile() -> None:
    world = straggling(wait_s=300.0)
    began = world.clock.now
    plan = None
    while plan is None and world.clock.now < began + 500:
        plan = world.plan(timeout_s=1.0)
        assert plan is not None or world.feed.waits_for is Wait.STRAGGLERS
    assert planned(plan) == [4, 5]
    assert world.clock.now - began == 300
    assert world.feed.metrics()["stream/straggler_wait_s"] == 300


def test_a_batch_that_redis_lost_is_awaited_anew_and_its_stragglers_too() -> None:
    world = straggling(wait_s=30.0)
    assert world.plan(timeout_s=20.0) is None
    world.server.groups["train"].clear()
    world.server.disturbed = True
    assert world.plan(timeout_s=5.0) is None
    assert world.feed.waits_for is Wait.GROUPS
    for number in (4, 5):
        world.answer(number)
    assert world.plan(timeout_s=20.0) is None
    assert world.feed.waits_for is Wait.STRAGGLERS
    assert planned(world.plan(timeout_s=20.0)) == [4, 5]


def test_a_group_in_hand_that_got_too_old_meanwhile_is_dropped() -> None:
    world = FeedWorld(waiting_config(wait_s=5.0))
    world.plan()
    for number in (1, 2):
        world.answer(number)
    world.train(step_of(world))
    world.plan()
    for number in (0, 4, 5):
        world.answer(number)
    first = world.plan(timeout_s=10.0)
    assert planned(first) == [0, 4], "3 was awaited in vain"
    assert first is not None
    world.train(first)
    world.step += 1
    world.publish()
    world.plan()
    assert world.feed.metrics()["stream/dropped/stale"] == 1, "5 was left in hand, and two more steps were made"


def test_a_pause_is_no_waiting_for_stragglers() -> None:
    world = straggling(wait_s=30.0)
    assert world.plan(timeout_s=20.0) is None
    world.server.control = "pause"
    assert world.plan(timeout_s=100.0) is None
    assert world.feed.waits_for is Wait.RESUME
    world.server.control = "run"
    assert world.plan(timeout_s=20.0) is None
    assert world.feed.waits_for is Wait.STRAGGLERS


def test_after_a_restart_tickets_keep_their_deadlines() -> None:
    world = FeedWorld(waiting_config())
    world.plan()
    for number in (1, 2):
        world.answer(number)
    world.train(step_of(world))
    world.plan()
    world.commit()
    world.start()
    world.plan()
    for number in (4, 5):
        world.answer(number)
    assert world.plan() is None
    assert world.feed.waits_for is Wait.STRAGGLERS


def step_of(world: FeedWorld) -> Any:
    plan = world.plan()
    assert plan is not None, "nothing is ready"
    assert plan.kind is Kind.STEP
    return plan
