"""`redis.max_backlog_bytes`: what lies in Redis is bounded, and what a commit could free is committed early."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from streamrl.errors import TrainingError
from streamrl.learner.groups.plan import Kind
from streamrl.protocol.transport.types import entry_order
from streamrl.telemetry.metrics import is_metric
from tests.feed_world import FeedWorld, encode_answer, make_config, planned
from tests.helpers import make_ticket

GROUP = sum(len(part) for part in encode_answer(make_ticket(0)))
GROUPS_PER_STEP = 4


def budget(groups: float, **sections: Any) -> FeedWorld:
    """A world with room for so many groups, and a window of 16 tickets."""
    config = make_config(
        redis={"max_backlog_bytes": int(groups * GROUP) + 100},
        training={"groups_per_step": GROUPS_PER_STEP},
        lag={"max_steps": 3},
        sampling={"num_samples": 2, "max_tokens": 16},  # the largest group is about as large as all of them
        data={"max_prompt_tokens": 8},
        **sections,
    )
    return FeedWorld(config, num_prompts=64)


def in_redis(world: FeedWorld) -> int:
    return sum(len(entry.header) + len(entry.body) for entry in world.server.groups["train"].values())


def run(world: FeedWorld, *, max_rounds: int = 400) -> tuple[int, int]:
    """(the most bytes that were ever in Redis, commits that the feed asked for)"""
    most = num_commits = 0
    for _ in range(max_rounds):
        plan = world.plan(timeout_s=200.0)
        if plan is not None and plan.kind is Kind.END:
            return most, num_commits
        if plan is not None and plan.kind is Kind.COMMIT:
            world.commit()
            num_commits += 1
        elif plan is not None:
            world.train(plan)
        world.answer_all()
        most = max(most, in_redis(world))
    raise AssertionError(f"no end after {max_rounds} rounds: {world.feed.metrics()}")


def test_within_a_large_budget_the_window_is_the_only_bound_and_no_commit_is_asked_for() -> None:
    world = budget(1000)
    world.plan()
    assert len(world.tickets()) == 16
    assert run(world)[1] == 0


def test_no_more_tickets_go_out_than_the_budget_has_room_for() -> None:
    world = budget(10)
    world.plan()
    assert GROUPS_PER_STEP <= len(world.tickets()) <= 10
    world.answer_all()
    world.train(plan_of(world))
    world.answer_all()
    world.plan()
    assert world.feed.metrics()["stream/backlog_bytes"] <= 10 * GROUP + 100


def test_a_run_ends_within_its_budget_and_asks_for_the_commits_that_it_needs() -> None:
    for groups in (5, 8, 12, 20, 40):
        world = budget(groups)
        most, num_commits = run(world)
        assert most <= groups * GROUP + 100
        assert num_commits >= 64 / groups - 1
        assert num_commits <= 64 / (groups / 2) + 1, "each frees half of the budget, or what the next batch lacks"
        assert world.feed.metrics()["stream/groups_trained"] == 64


def test_a_budget_too_small_for_one_batch_still_trains() -> None:
    world = budget(1)
    most, _ = run(world)
    assert most <= GROUPS_PER_STEP * GROUP
    assert world.feed.metrics()["stream/groups_trained"] == 64


def test_drops_that_leave_no_room_for_a_batch_are_committed_although_they_are_few() -> None:
    world = budget(5)
    world.plan()
    for number in (0, 1):
        world.answer(number, rewards=(1.0, 1.0))
    plan = world.plan()
    assert plan is not None
    assert plan.kind is Kind.COMMIT
    world.commit()
    world.plan()
    assert len(world.tickets()) >= GROUPS_PER_STEP


def test_dropped_groups_behind_one_in_hand_are_let_go_too() -> None:
    world = budget(12)
    world.plan()
    world.answer(0)
    world.plan()
    while world.feed.metrics().get("stream/dropped/zero_variance", 0) < 40:
        for number in sorted(world.tickets()):
            world.answer(number, rewards=(1.0, 1.0))
        plan = world.plan(timeout_s=1.0)
        if plan is not None:
            assert plan.kind is Kind.COMMIT
            world.commit()
            read = entry_order(world.committed.cursor)
            left = [entry.number for entry in world.server.groups["train"].values() if entry_order(entry.id) <= read]
            assert left == [0], "of those that were read"
        assert in_redis(world) <= 12 * GROUP + 100


def test_a_commit_that_failed_is_asked_for_again_after_a_while_and_memory_stays_bounded_meanwhile() -> None:
    world = budget(6)
    asked: list[float] = []
    for _ in range(100):
        plan = world.plan(timeout_s=5.0)
        if plan is not None and plan.kind is Kind.COMMIT:
            asked.append(world.clock.now)  # the disk is full
        elif plan is not None:
            world.train(plan)
        world.answer_all()
        assert in_redis(world) <= 6 * GROUP + 100
    assert len(asked) >= 3
    assert min(b - a for a, b in pairwise(asked)) >= 60.0
    world.commit()
    world.plan()
    assert len(world.tickets()) >= GROUPS_PER_STEP, "room was made, and is used"


def test_a_run_whose_budget_is_used_up_waits_for_a_commit_for_hours_and_from_then_on_for_its_groups() -> None:
    world = budget(6)
    until = world.clock.now + 7200.0
    while world.clock.now < until:
        plan = world.plan(timeout_s=5.0)
        if plan is not None and plan.kind is not Kind.COMMIT:  # the disk is full
            world.train(plan)
        world.answer_all()
    assert world.tickets() == {}, "nothing is under way"
    world.commit()
    assert world.plan(timeout_s=500.0) is None, "what was waited before does not count"
    assert len(world.tickets()) >= GROUPS_PER_STEP
    with pytest.raises(TrainingError, match="no group arrived for 600 s"):
        world.plan(timeout_s=200.0)


def test_after_a_restart_what_redis_holds_still_counts() -> None:
    world = budget(12)
    world.plan()
    world.answer_all()
    world.train(plan_of(world))
    world.commit(told=False)
    in_stream = in_redis(world)
    world.start()
    world.feed.reconcile(step=world.step)
    metrics = world.feed.metrics()
    assert metrics["stream/backlog_bytes"] >= in_stream
    assert run(world)[0] <= 12 * GROUP + 100
    assert [name for name in metrics if not is_metric(name)] == []


def plan_of(world: FeedWorld) -> Any:
    plan = world.plan()
    planned(plan)
    return plan
