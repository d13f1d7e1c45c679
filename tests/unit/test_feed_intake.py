"""What becomes of delivered groups: failures, groups of others, and what anybody may write."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamrl.protocol.wire.group import encode_group
from streamrl.protocol.wire.ticket import Ticket
from tests.feed_world import FeedWorld, encode_answer, encode_failure, make_config, planned
from tests.helpers import make_group, make_sample, make_ticket

BIG = make_config(training={"groups_per_step": 4}, lag={"max_steps": 0})


def test_a_group_of_another_model_is_dropped() -> None:
    world = FeedWorld()
    world.plan()
    world.answer(0, fingerprint="another tokenizer")
    world.plan()
    assert world.feed.metrics()["stream/dropped/wrong_model"] == 1


def test_a_reported_failure_is_tried_again_with_its_attempt() -> None:
    world = FeedWorld()
    world.plan()
    world.fail(1)
    world.plan()
    assert world.tickets()[1].attempt == 1
    world.answer(1)
    world.answer(0)
    assert planned(world.plan()) == [1, 0]


def test_a_ticket_that_failed_too_often_goes_to_the_dead_letters_with_its_error() -> None:
    world = FeedWorld()
    world.plan()
    for attempt in range(3):
        world.fail(1, error=f"failure {attempt}")
        world.plan()
    assert [(ticket.number, error) for ticket, error in world.server.dead] == [(1, "failure 2")]
    metrics = world.feed.metrics()
    assert (metrics["stream/dead"], metrics["stream/outstanding"]) == (1, 4)


def test_a_failure_of_an_earlier_attempt_is_counted_once() -> None:
    world = FeedWorld()
    world.plan()
    first_attempt = world.tickets()[1]
    world.fail(1)
    world.forge(1, header=encode_failure(first_attempt)[0], identity=first_attempt.identity, ticket_entry="1-0")
    world.plan()
    world.plan()
    assert world.tickets()[1].attempt == 1
    assert world.feed.metrics()["stream/ignored/late_failure"] == 1


def test_a_ticket_whose_old_attempt_was_given_out_again_by_a_redis_that_went_back_is_asked_for_again() -> None:
    world = FeedWorld()
    world.plan()
    before = dict(world.server.tickets["train"])
    world.fail(1)
    world.plan()
    world.server.tickets["train"] = before  # the first attempt waits, and the second is gone
    world.feed.reconcile(step=0)
    world.fail(1)
    world.plan()
    assert 1 not in world.tickets()
    world.plan()
    assert world.tickets()[1].attempt == 1


def test_messages_that_decide_no_ticket_are_ignored_and_counted() -> None:
    world = FeedWorld(BIG)
    world.plan()
    header, body = encode_answer(world.tickets()[0])
    world.answer(0)
    world.forge(0, header=header, body=body)  # in hand already
    world.forge(1, run_uid="a deleted run")
    world.forge(-1)
    world.forge(1000)
    world.forge(1000, header=encode_group(make_group(make_ticket(1000)))[0], identity=make_ticket(1000).identity)
    for _ in range(6):
        assert world.plan() is None
    world.answer_all()
    assert planned(world.plan()) == [0, 1, 2, 3]
    metrics = world.feed.metrics()
    assert metrics["stream/ignored/duplicate"] == 1
    assert metrics["stream/ignored/wrong_run"] == 1
    assert metrics["stream/ignored/malformed"] == 2
    assert metrics["stream/ignored/unknown_ticket"] == 1


@pytest.mark.parametrize(
    "forged",
    [
        lambda ticket: b"",
        lambda ticket: b"\xff" * 100,
        lambda ticket: encode_group(make_group(make_ticket(3)))[0],
        lambda ticket: encode_group(make_group(ticket, run_uid="another"))[0],
        lambda ticket: encode_group(make_group(ticket, purpose="eval"))[0],
        lambda ticket: encode_group(make_group(ticket, samples=tuple(make_sample() for _ in range(3))))[0],
    ],
)
def test_a_malformed_answer_by_who_held_the_ticket_drops_it_and_stops_nothing(
    forged: Callable[[Ticket], bytes],
) -> None:
    world = FeedWorld(BIG)
    world.plan()
    world.deliver(1, forged(world.tickets()[1]))
    assert world.plan() is None
    assert world.feed.metrics()["stream/dropped/malformed"] == 1


def test_a_flood_of_bad_messages_does_not_hold_a_plan_up_beyond_its_time() -> None:
    world = FeedWorld()
    world.plan()
    for _ in range(1000):
        world.forge(-1)
    assert world.plan() is None
    assert world.feed.metrics()["stream/ignored/malformed"] <= 4
