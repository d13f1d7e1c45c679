"""What may end a ticket, and what is set aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from streamrl.learner.groups.plan import GroupCheck
from streamrl.protocol.wire.ticket import Ticket
from tests.feed_world import FeedWorld, encode_answer, encode_failure, make_config, planned

BIG = make_config(training={"groups_per_step": 4}, lag={"max_steps": 0})
UNASKED: Mapping[str, Callable[[Ticket], tuple[bytes, bytes]]] = {
    "no header": lambda ticket: (b"rubbish", b""),
    "another model": lambda ticket: encode_answer(ticket, fingerprint="another"),
    "a failure": lambda ticket: encode_failure(ticket),
    "a sound answer": lambda ticket: encode_answer(ticket),
}


@pytest.mark.parametrize("kind", UNASKED)
def test_what_no_holder_of_a_lease_delivered_ends_no_ticket(kind: str) -> None:
    world = FeedWorld(BIG)
    world.plan()
    header, body = UNASKED[kind](world.tickets()[1])
    world.forge(1, header=header, body=body, identity=world.tickets()[1].identity)
    assert world.plan() is None
    assert world.feed.metrics()["stream/ignored/not_leased"] == 1
    assert world.tickets()[1].attempt == 0
    world.answer_all()
    assert planned(world.plan()) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [kind for kind in UNASKED if kind != "a sound answer"])
def test_who_imitates_a_delivery_ends_no_ticket_that_still_waits(kind: str) -> None:
    world = FeedWorld(BIG)
    world.plan()
    ticket, entry_id = world.tickets()[1], world.ticket_id(1)
    header, body = UNASKED[kind](ticket)
    world.forge(1, header=header, body=body, identity=ticket.identity, ticket_entry=entry_id)
    assert world.plan() is None
    assert world.feed.metrics()["stream/ignored/not_leased"] == 1
    world.answer_all()
    assert planned(world.plan()) == [0, 1, 2, 3]


def test_a_body_that_the_ranks_refuse_ends_no_ticket_that_still_waits() -> None:
    world = FeedWorld()
    world.plan()
    ticket, entry_id = world.tickets()[1], world.ticket_id(1)
    header, _ = encode_answer(ticket)
    world.forge(1, header=header, body=b"rubbish", identity=ticket.identity, ticket_entry=entry_id)
    world.answer(0)
    plan = world.plan()
    assert planned(plan) == [1, 0]
    assert plan is not None
    world.train(plan, [GroupCheck.MALFORMED, GroupCheck.SOUND])
    assert world.feed.metrics()["stream/ignored/not_leased"] == 1
    world.answer(1)
    world.answer(2)
    assert planned(world.plan()) == [1, 2]


def test_an_answer_to_something_else_under_a_number_of_ours_is_ignored_and_ours_is_asked_for_again() -> None:
    world = FeedWorld(BIG)
    world.plan()
    entry_id, theirs = world.ticket_id(1), replace(world.tickets()[1], retry_of=0)
    world.server.tickets["train"][entry_id] = theirs
    header, body = encode_answer(theirs)
    world.deliver(1, header, body)
    world.plan()
    assert world.feed.metrics()["stream/ignored/not_asked"] == 1
    world.plan()
    assert world.tickets()[1].retry_of is None
    world.answer_all()
    assert planned(world.plan()) == [0, 1, 2, 3]
