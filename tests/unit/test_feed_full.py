"""A full Redis takes no more tickets: what is there is trained, a commit is asked for, and they wait for room."""

from __future__ import annotations

from streamrl.errors import TransportError
from streamrl.learner.groups.plan import Kind, Plan
from tests.feed_world import FeedWorld, make_config, planned


def step_of(world: FeedWorld) -> Plan:
    plan = world.plan()
    assert plan is not None, "nothing is ready"
    return plan


def full_world() -> FeedWorld:
    """Two batches are there, and Redis has become full."""
    world = FeedWorld(num_prompts=12)
    world.plan()
    world.answer_all()
    world.server.full = True
    return world


def test_batches_that_are_there_are_trained_though_no_ticket_goes_out() -> None:
    world = full_world()
    first = step_of(world)
    assert planned(first) == [0, 1]
    world.train(first)
    second = step_of(world)
    assert planned(second) == [2, 3]
    world.train(second)
    assert world.tickets() == {}


def test_when_nothing_is_left_to_train_a_commit_is_asked_for_and_the_tickets_go_out_once_there_is_room() -> None:
    world = full_world()
    for _ in range(2):
        world.train(step_of(world))
    assert step_of(world).kind is Kind.COMMIT
    world.commit()
    assert world.plan(timeout_s=3600.0) is None, "others have taken the room, and no group is to be expected"
    world.feed.reconcile(step=world.step)
    assert world.tickets() == {}, "a look at Redis changes nothing"
    assert world.feed.metrics()["stream/backlog_bytes"] == 0, "what is refused is not on its way"
    world.server.full = False
    assert world.plan() is None
    issued = [ticket.number for ticket in world.server.tickets["train"].values()]
    assert issued == [4, 5, 6, 7]
    assert {ticket.issued_step for ticket in world.tickets().values()} == {2}, "with the weights of now, not of then"
    assert world.run_to_end() == list(range(4, 12))


def test_no_commit_is_asked_for_while_a_batch_is_on_its_way_or_nothing_would_be_freed() -> None:
    world = FeedWorld(num_prompts=12)
    world.plan()
    world.answer(0)
    world.answer(1)
    world.server.full = True
    world.train(step_of(world))
    assert world.plan() is None, "2 and 3 are with workers"
    world.commit()
    world.answer_all()
    world.train(step_of(world))
    assert step_of(world).kind is Kind.COMMIT
    world.commit()
    assert world.plan(timeout_s=100.0) is None


def test_a_commit_that_would_free_something_is_requested_now_and_then() -> None:
    world = FeedWorld(num_prompts=12)
    world.plan()
    world.answer_all()
    first = step_of(world)
    assert not world.feed.request_commit(), "nothing has ended"
    world.train(first)
    assert world.feed.request_commit()
    assert not world.feed.request_commit(), "it was asked for, and the checkpoint may have failed"
    world.clock.advance(60.0)
    assert world.feed.request_commit()
    world.commit()
    assert not world.feed.request_commit()


def test_a_refused_ticket_stays_one_through_looks_failures_and_crashes() -> None:
    world = FeedWorld(make_config(training={"groups_per_step": 4}, lag={"max_steps": 0}), num_prompts=8)
    world.plan()
    world.fail(1)
    world.server.full = True
    assert step_of(world).kind is Kind.COMMIT
    world.feed.reconcile(step=0)
    world.fail(2)
    assert world.plan() is None
    assert sorted(world.tickets()) == [0, 3]
    world.commit()
    world.start()
    assert world.plan() is None
    world.server.full = False
    assert world.plan() is None
    issued = sorted((ticket.number, ticket.attempt) for ticket in world.server.tickets["train"].values())
    assert issued == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_a_refused_ticket_that_ended_otherwise_is_not_issued_again() -> None:
    world = FeedWorld(make_config(training={"groups_per_step": 1}), num_prompts=8)
    world.plan()
    copy = dict(world.server.tickets["train"])
    world.fail(0)
    world.server.full = True
    assert world.plan() is None
    world.server.tickets["train"] = copy  # Redis went back, and somebody answers the first attempt
    world.answer(0)
    world.train(step_of(world))
    world.server.full = False
    world.plan()
    assert sorted(world.tickets()) == [1, 2]


def test_a_reply_that_is_lost_while_tickets_wait_leaves_each_there_once() -> None:
    world = full_world()
    world.train(step_of(world))
    world.train(step_of(world))
    world.commit()
    assert world.plan() is None
    world.server.full = False

    def lose(at: str) -> None:
        if at == "issue:after":
            world.server.fault = lambda at: None
            raise TransportError("the connection was lost")

    world.server.fault = lose
    try:
        world.plan()
    except TransportError:
        world.plan()
    assert sorted(ticket.number for ticket in world.server.tickets["train"].values()) == [4, 5, 6, 7]


def test_a_drained_run_gets_what_was_refused() -> None:
    world = full_world()
    for _ in range(2):
        world.train(step_of(world))
    world.server.control = "drain"
    assert step_of(world).kind is Kind.COMMIT
    world.server.full = False
    assert world.plan() is None
    assert sorted(world.tickets()) == [4, 5], "they are counted as issued, and the others are not"
