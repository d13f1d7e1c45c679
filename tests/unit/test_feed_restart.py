"""How a feed begins again from a commit, by example; `test_feed_crashes` looks for what is not thought of."""

from __future__ import annotations

from tests.feed_world import FeedWorld, encode_answer, make_config, planned
from tests.helpers import make_ticket


def test_what_was_trained_after_the_commit_is_trained_again_from_the_stream() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    first = world.plan()
    assert first is not None
    world.train(first)
    world.start()
    assert planned(world.plan()) == planned(first)


def test_what_was_trained_before_the_commit_is_not_trained_again() -> None:
    world = FeedWorld(num_prompts=6)
    world.plan()
    world.answer_all()
    first = world.plan()
    assert first is not None
    world.train(first)
    world.commit()
    world.start()
    assert sorted(world.run_to_end()) == [2, 3, 4, 5]


def test_the_carry_is_trained_first_after_a_restart() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(3)
    world.plan()
    world.commit()
    assert len(world.committed.carry) == 1
    world.answer(1)
    world.start()
    assert planned(world.plan(timeout_s=5.0)) == [3, 1]


def test_a_state_taken_between_plan_and_verdict_carries_the_planned_groups() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    plan = world.plan()
    world.committed = world.feed.state()
    world.start()
    assert planned(world.plan()) == planned(plan)


def test_a_carry_that_is_longer_than_a_batch_is_trained_in_several() -> None:
    world = FeedWorld(make_config(training={"groups_per_step": 4}, lag={"max_steps": 0}), num_prompts=4)
    world.plan()
    for number in (0, 1, 2):
        world.answer(number)
    world.plan()
    world.commit()
    world.config = make_config(training={"groups_per_step": 2})
    world.start()
    first = world.plan()
    assert planned(first) == [0, 1]
    assert len(world.feed.state().carry) == 3
    assert sorted(world.tickets()) == [3], "it is there already"


def test_tickets_issued_after_the_commit_are_not_issued_twice() -> None:
    world = FeedWorld()
    world.commit()
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3]
    world.start()
    world.plan()
    assert len(world.server.tickets["train"]) == 4
    assert world.feed.metrics()["stream/issued"] == 4


def test_tickets_lost_between_those_that_are_there_are_issued_again() -> None:
    world = FeedWorld()
    world.commit()
    world.plan()
    del world.server.tickets["train"][world.ticket_id(1)]
    world.answer(2)
    world.start()
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 3]


def test_a_resolved_ticket_that_came_back_is_deleted() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.commit()
    world.stream.issue([make_ticket(0)])
    world.start()
    world.plan()
    assert 0 not in world.tickets()


def test_a_lost_carry_is_asked_for_again() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(3)
    world.plan()
    world.commit()
    world.server.flush()
    world.start()
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3]


def test_a_forged_number_far_up_does_not_move_the_counter() -> None:
    world = FeedWorld(make_config(training={"max_epochs": 10**9}))
    world.commit()
    world.plan()
    forged = make_ticket(10**9)
    header, body = encode_answer(forged)
    world.forge(10**9, header=header, body=body, identity=forged.identity)
    world.start()
    world.plan()
    assert world.feed.metrics()["stream/issued"] == 4
    world.plan()
    assert world.feed.metrics()["stream/ignored/unknown_ticket"] == 1


def test_numbers_past_the_end_of_the_data_are_nobodys() -> None:
    world = FeedWorld(num_prompts=4)
    world.plan()
    world.stream.issue([make_ticket(4)])
    world.start()
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3]


def test_failures_counted_before_the_commit_still_count() -> None:
    world = FeedWorld()
    world.plan()
    world.fail(1)
    world.plan()
    world.fail(1)
    world.plan()
    world.commit()
    world.start()
    world.plan()
    world.fail(1)
    world.plan()
    assert [ticket.number for ticket, _ in world.server.dead] == [1]
