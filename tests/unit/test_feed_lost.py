"""What is lost, spoiled or too much in Redis: noticed, and put right once."""

from __future__ import annotations

import pytest

from streamrl.errors import TransportError
from streamrl.learner.groups.plan import GroupCheck
from tests.feed_world import FeedWorld, make_config, planned
from tests.helpers import make_ticket


def spoil(world: FeedWorld, number: int) -> None:
    world.server.rotten.add(world.ticket_id(number))


def test_a_ticket_that_nobody_can_read_is_issued_again_and_counts_as_failed() -> None:
    world = FeedWorld()
    world.plan()
    spoil(world, 1)
    assert world.plan(timeout_s=100.0) is None
    assert not world.server.rotten & set(world.server.tickets["train"])
    assert world.tickets()[1].attempt == 1
    assert [world.tickets()[number].attempt for number in (0, 2, 3)] == [0, 0, 0]


def test_a_ticket_that_is_spoiled_each_time_ends_among_the_dead_letters() -> None:
    world = FeedWorld(make_config(worker={"max_attempts": 2}))
    world.plan()
    for _ in range(2):
        spoil(world, 1)
        world.plan(timeout_s=100.0)
    [(ticket, error)] = world.server.dead
    assert (ticket.number, error) == (1, "no worker could read the ticket: rotten")
    assert sorted(world.tickets()) == [0, 2, 3, 4]


def test_a_bad_ticket_is_found_although_other_groups_keep_coming() -> None:
    world = FeedWorld(num_prompts=100)
    world.plan()
    spoil(world, 1)
    for _ in range(40):
        for number in [n for n in world.tickets() if n != 1]:
            world.answer(number)
        plan = world.plan(timeout_s=1.0)
        if plan is not None:
            world.train(plan)
        world.clock.advance(20.0)
    assert world.tickets()[1].attempt == 1


def test_rubbish_among_the_tickets_is_removed_and_counts_for_nobody() -> None:
    world = FeedWorld()
    world.plan()
    for number in (1, 1000, -1):
        world.stream.issue([make_ticket(number)])
        world.server.rotten.add(list(world.server.tickets["train"])[-1])
    world.feed.reconcile(step=0)
    assert len(world.server.tickets["train"]) == 4
    assert world.tickets()[1].attempt == 0


def test_of_two_entries_of_one_ticket_the_first_stays() -> None:
    world = FeedWorld()
    world.plan()
    first = world.ticket_id(1)
    world.stream.issue([make_ticket(1)])
    world.feed.reconcile(step=0)
    assert [i for i, ticket in world.server.tickets["train"].items() if ticket.number == 1] == [first]


def test_what_a_refused_look_would_have_found_is_looked_for_again_at_once() -> None:
    world = FeedWorld()
    world.plan()
    world.server.flush()

    def refuse(at: str) -> None:
        if at == "restore:before":
            raise TransportError("MISCONF Redis is configured to save RDB snapshots, but it cannot")

    world.server.fault = refuse
    with pytest.raises(TransportError):
        world.plan()
    world.server.fault = lambda at: None
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3]


@pytest.mark.parametrize("trained", [True, False])
def test_a_group_lost_before_the_ranks_fetched_it_is_asked_for_again(trained: bool) -> None:
    world = FeedWorld(num_prompts=6)
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    [first, second] = planned(plan)
    del world.server.groups["train"][plan.entries[0].entry_id]
    world.feed.settle(plan, [GroupCheck.MISSING, GroupCheck.SOUND], trained=trained)
    metrics = world.feed.metrics()
    assert (metrics["stream/ignored/missing"], metrics["stream/outstanding"]) == (1, 3)
    assert "stream/dropped/malformed" not in metrics
    world.step += 1
    world.publish()
    world.plan()
    assert first in world.tickets()
    assert second not in world.tickets()
    assert world.tickets()[first].attempt == 0


def test_a_checkpoint_right_after_a_group_was_lost_does_not_lose_its_ticket() -> None:
    world = FeedWorld(num_prompts=6)
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    [lost, _] = planned(plan)
    del world.server.groups["train"][plan.entries[0].entry_id]
    world.train(plan, [GroupCheck.MISSING, GroupCheck.SOUND])
    world.commit()
    world.start()
    world.plan()
    assert lost in world.tickets()


def test_the_verdicts_of_the_ranks_say_why_a_group_was_dropped() -> None:
    world = FeedWorld()
    world.plan()
    world.answer_all()
    plan = world.plan()
    assert plan is not None
    world.train(plan, [GroupCheck.STALE, GroupCheck.MALFORMED])
    metrics = world.feed.metrics()
    assert (metrics["stream/dropped/stale"], metrics["stream/dropped/malformed"]) == (1, 1)
    assert metrics["stream/dropped_by_length/128"] == 2


@pytest.mark.parametrize("point", ["issue:before", "issue:after"])
def test_a_lost_command_or_reply_leaves_every_ticket_there_once(point: str) -> None:
    world = FeedWorld()

    def lose(at: str) -> None:
        if at == point:
            raise TransportError("the connection was lost")

    world.server.fault = lose
    with pytest.raises(TransportError):
        world.plan()
    world.server.fault = lambda at: None
    world.plan()
    assert sorted(ticket.number for ticket in world.server.tickets["train"].values()) == [0, 1, 2, 3]


def test_after_the_server_lost_everything_all_is_asked_for_again() -> None:
    world = FeedWorld(num_prompts=6)
    world.plan()
    world.answer(0)
    world.plan()  # in hand, and its body is about to be lost
    world.server.flush()
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3]
    assert sorted(world.run_to_end()) == list(range(6))


def test_a_ticket_that_vanished_is_issued_again_after_some_patience() -> None:
    world = FeedWorld()
    world.plan()
    del world.server.tickets["train"][world.ticket_id(1)]
    assert world.plan(timeout_s=50.0) is None
    assert sorted(world.tickets()) == [0, 2, 3]
    assert world.plan(timeout_s=50.0) is None
    assert sorted(world.tickets()) == [0, 1, 2, 3]
