"""What is issued and planned, how long a plan waits, and what the operator's orders do."""

from __future__ import annotations

import pytest

from streamrl.errors import Fenced, TrainingError
from streamrl.learner.groups.plan import GroupCheck, Kind
from streamrl.versions import make_version
from tests.feed_world import FeedWorld, make_config, planned


def test_tickets_are_issued_in_order_up_to_the_window() -> None:
    world = FeedWorld()
    assert world.plan() is None
    assert sorted(world.tickets()) == [0, 1, 2, 3], "(lag of 1 + 1) x 2 groups a step"
    ticket = world.tickets()[2]
    assert (ticket.data_epoch, ticket.prompt_index) == world.prompts.locate(2)
    assert ticket.prompt == f"prompt {ticket.prompt_index}"
    assert ticket.fields == {"answer": ticket.prompt_index}
    assert (ticket.run_uid, ticket.purpose, ticket.num_samples, ticket.attempt) == ("uid", "train", 2, 0)


def test_a_batch_is_planned_in_the_order_in_which_its_groups_came() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(3, num_tokens=10)
    assert world.plan() is None
    world.answer(1, num_tokens=20)
    plan = world.plan(world_size=2)
    assert planned(plan) == [3, 1]
    assert plan is not None
    assert {entry.rank for entry in plan.entries} == {0, 1}
    entries = world.stream.fetch("train", [entry.entry_id for entry in plan.entries])
    assert [entry and entry.number for entry in entries] == [3, 1]


def test_a_plan_tells_how_many_tickets_were_answered_before_it_whatever_became_of_them() -> None:
    world = FeedWorld(make_config(lag={"max_steps": 2}, worker={"max_attempts": 1}), num_prompts=12)
    world.plan()
    world.fail(0)  # dies: nobody answered it
    world.answer(1, rewards=(1.0, 1.0))
    for number in (2, 3, 4, 5):
        world.answer(number)
    first = world.plan(timeout_s=9.0)
    assert planned(first) == [2, 3]
    assert first is not None
    assert first.num_answered == 1
    world.train(first)
    world.commit()
    for _ in range(2):  # and a learner that goes on from there tells the same
        second = world.plan(timeout_s=9.0)
        assert planned(second) == [4, 5]
        assert second is not None
        assert second.num_answered == 3
        world.start()


def test_new_tickets_wait_until_the_weights_of_the_step_are_out() -> None:
    world = FeedWorld(make_config(lag={"max_steps": 0}))
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    world.feed.settle(plan, [GroupCheck.SOUND] * 2, trained=True)
    assert world.tickets() == {}
    world.step += 1
    world.publish()
    world.plan()
    assert {ticket.min_version for ticket in world.tickets().values()} == {make_version(1, 1)}, "on-policy"


def test_a_worker_may_begin_as_far_behind_as_the_lag_allows() -> None:
    world = FeedWorld(make_config(lag={"max_steps": 2}))
    for _ in range(4):
        world.step += 1
        world.publish()
    world.plan()
    assert {ticket.min_version for ticket in world.tickets().values()} == {make_version(1, 2)}
    assert {ticket.issued_step for ticket in world.tickets().values()} == {4}


def test_groups_that_the_ranks_refuse_are_dropped_and_the_others_trained() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    world.train(plan, [GroupCheck.SOUND, GroupCheck.MALFORMED])
    metrics = world.feed.metrics()
    assert (metrics["stream/groups_trained"], metrics["stream/dropped/malformed"]) == (1, 1)


def test_groups_of_a_skipped_step_are_dropped_for_that_reason() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    world.feed.settle(plan, [GroupCheck.SOUND, GroupCheck.MALFORMED], trained=False)
    metrics = world.feed.metrics()
    assert (metrics["stream/groups_trained"], metrics["stream/groups_dropped"]) == (0, 2)
    assert (metrics["stream/dropped/non_finite"], metrics["stream/dropped/malformed"]) == (1, 1)


def test_what_is_dropped_makes_room_for_new_tickets_at_once() -> None:
    world = FeedWorld()
    world.plan()
    for number in range(3):
        world.answer(number, rewards=(1.0, 1.0))
    world.plan()
    world.plan()
    assert world.feed.metrics()["stream/dropped/zero_variance"] == 3
    assert sorted(world.tickets()) == [3, 4, 5, 6]


def test_the_last_batch_may_be_partial_and_then_comes_the_end() -> None:
    world = FeedWorld(num_prompts=5)
    assert sorted(world.run_to_end()) == [0, 1, 2, 3, 4]
    assert world.step == 3
    assert world.feed.metrics()["stream/outstanding"] == 0
    plan = world.plan()
    assert plan is not None
    assert plan.kind is Kind.END


def test_at_the_end_a_partial_batch_waits_for_what_is_still_under_way() -> None:
    world = FeedWorld(num_prompts=3)
    world.plan()
    world.answer(0)
    assert world.plan() is None
    world.fail(1)
    assert world.plan() is None
    world.answer(2, rewards=(0.0, 0.0))
    assert world.plan() is None
    world.answer(1)
    assert planned(world.plan()) == [0, 1]


def test_the_data_is_gone_through_as_often_as_asked() -> None:
    world = FeedWorld(make_config(training={"max_epochs": 3}), num_prompts=3)
    assert sorted(world.run_to_end()) == list(range(9))


# Waiting


def test_a_plan_waits_no_longer_than_told() -> None:
    world = FeedWorld()
    began = world.clock.now
    assert world.plan(timeout_s=7.0) is None
    assert 7.0 <= world.clock.now - began <= 8.0


def test_a_run_without_groups_ends_with_an_error_that_says_what_to_look_at() -> None:
    world = FeedWorld()
    with pytest.raises(TrainingError, match=r"no group arrived for 600 s .* 4 tickets are outstanding"):
        world.plan(timeout_s=10_000.0)


def test_groups_in_hand_that_are_read_again_do_not_begin_the_wait_anew() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(0)
    began = world.clock.now
    with pytest.raises(TrainingError, match=r"no group arrived for 600 s .* 4 tickets are outstanding"):
        world.plan(timeout_s=10_000.0)
    assert world.clock.now - began == 600, "whatever was looked for in Redis meanwhile"


def test_time_spent_in_a_step_does_not_count_as_waiting_for_groups() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(0)
    world.answer(1)
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.clock.advance(5000.0)
    assert world.plan(timeout_s=10.0) is None


# The operator's word


def test_stop_ends_at_once_and_keeps_what_is_in_hand_as_carry() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(2)
    world.plan()
    world.server.control = "stop"
    plan = world.plan()
    assert plan is not None
    assert plan.kind is Kind.STOP
    assert len(world.feed.state().carry) == 1


def test_drain_trains_what_is_under_way_and_then_stops() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(2)
    world.plan()
    world.server.control = "drain"
    world.fail(3)
    assert world.plan() is None
    world.answer_all()
    plan = world.plan()
    assert planned(plan) == [2, 0]
    assert plan is not None
    world.train(plan)
    plan = world.plan()
    assert planned(plan) == [1, 3]
    assert plan is not None
    world.train(plan)
    assert sorted(world.tickets()) == []
    end = world.plan()
    assert end is not None
    assert end.kind is Kind.STOP, "tickets of the run are left"


def test_a_pause_makes_no_step_and_issues_nothing_and_is_no_idleness() -> None:
    world = FeedWorld()
    world.server.control = "pause"
    assert world.plan(timeout_s=5000.0) is None
    assert world.tickets() == {}
    world.server.control = "run"
    world.plan()
    world.answer_all()
    world.server.control = "pause"
    assert world.plan(timeout_s=5000.0) is None
    world.server.control = "run"
    assert planned(world.plan(timeout_s=5.0)) == [0, 1]


def test_a_replaced_learner_can_issue_nothing() -> None:
    world = FeedWorld()
    zombie = world.feed
    world.start()
    with pytest.raises(Fenced):
        zombie.plan(step=0, world_size=1, timeout_s=0.0)
