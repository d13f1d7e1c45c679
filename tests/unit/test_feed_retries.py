"""`dead retry`: a dead ticket is issued anew, once, under a new number, whatever happens in between."""

from __future__ import annotations

from collections import Counter

import pytest

from streamrl.errors import TransportError
from streamrl.learner.groups.plan import Kind
from tests.feed_world import FeedWorld, make_config, planned

ONE_ATTEMPT = make_config(worker={"max_attempts": 1})


def with_a_dead_ticket(number: int = 1, *, num_prompts: int = 10) -> FeedWorld:
    world = FeedWorld(ONE_ATTEMPT, num_prompts=num_prompts)
    world.plan()
    kill(world, number)
    return world


def kill(world: FeedWorld, number: int) -> None:
    world.fail(number)
    world.plan()
    assert number in [ticket.number for ticket, _ in world.server.dead]


def prompts_by_number(world: FeedWorld) -> dict[int, int]:
    return {number: ticket.prompt_index for number, ticket in world.tickets().items()}


def test_a_retry_gets_the_next_number_and_the_prompt_of_the_dead_ticket() -> None:
    world = with_a_dead_ticket()
    world.answer(0)
    world.answer(2)
    plan = world.plan()
    assert plan is not None
    world.server.ask_for_retry(1)
    world.train(plan)
    world.plan()
    tickets = world.tickets()
    assert sorted(tickets) == [3, 4, 5, 6]
    assert (tickets[5].retry_of, tickets[5].attempt) == (1, 0)
    assert tickets[5].prompt_index == world.prompts.locate(1)[1]
    assert tickets[6].prompt_index == world.prompts.locate(5)[1], "the data goes on behind it"
    assert tickets[6].retry_of is None
    assert (world.server.retry_requests, world.server.dead) == (set(), [])
    assert world.feed.metrics()["stream/retries"] == 1


def test_every_prompt_is_trained_once_and_the_repeated_one_too() -> None:
    world = with_a_dead_ticket(num_prompts=6)
    world.server.ask_for_retry(1)
    trained = world.run_to_end()
    assert sorted(trained) == [0, 2, 3, 4, 5, 6]
    assert world.feed.metrics()["stream/issued"] == 7


def test_a_retry_that_dies_can_be_repeated_itself() -> None:
    world = with_a_dead_ticket(num_prompts=4)
    world.server.ask_for_retry(1)
    world.answer(0)
    world.answer(2)
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.plan()
    kill(world, 4)
    world.server.ask_for_retry(4)
    world.plan()
    again = world.tickets()[5]
    assert (again.retry_of, again.prompt_index) == (4, world.prompts.locate(1)[1])
    assert 5 in world.run_to_end()


def test_retries_keep_to_the_window_and_go_first() -> None:
    world = FeedWorld(ONE_ATTEMPT, num_prompts=50)
    world.plan()
    for number in range(3):
        world.fail(number)
    while len(world.server.dead) < 3:
        world.plan()
    for number in range(3):
        world.server.ask_for_retry(number)
    assert sorted(world.tickets()) == [3, 4, 5, 6]
    world.fail(3)
    world.plan()
    assert world.tickets()[7].retry_of == 0
    assert sorted(world.tickets()) == [4, 5, 6, 7]


def test_a_request_for_a_ticket_that_is_not_dead_changes_nothing() -> None:
    world = with_a_dead_ticket()
    world.server.retry_requests |= {3, 999}
    world.answer(0)
    world.answer(2)
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.plan()
    assert sorted(world.tickets()) == [3, 4, 5, 6]
    assert all(ticket.retry_of is None for ticket in world.tickets().values())


@pytest.mark.parametrize("point", ["issue:before", "issue:after"])
def test_a_lost_command_or_reply_repeats_the_ticket_once(point: str) -> None:
    world = with_a_dead_ticket(num_prompts=6)
    world.server.ask_for_retry(1)
    world.answer(0)
    world.plan()

    def lose(at: str) -> None:
        if at == point:
            raise TransportError("the connection was lost")

    world.fail(2)
    world.server.fault = lose
    with pytest.raises(TransportError):
        world.plan()
    world.server.fault = lambda at: None
    world.plan()
    retries = [ticket for ticket in world.server.tickets["train"].values() if ticket.retry_of == 1]
    assert len(retries) == 1
    assert world.server.retry_requests == set()


def test_a_learner_that_goes_on_from_before_the_retry_finds_it_in_redis() -> None:
    world = with_a_dead_ticket()
    world.commit()
    world.server.ask_for_retry(1)
    world.answer(0)
    world.answer(2)
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.plan()
    before = prompts_by_number(world)
    del world.server.tickets["train"][world.ticket_id(5)]  # the retry itself is lost
    world.start()
    world.plan()
    assert world.tickets()[5].retry_of == 1
    after = prompts_by_number(world)
    assert {number: after[number] for number in before} == before
    assert world.feed.metrics()["stream/retries"] == 1


def test_a_learner_that_goes_on_from_after_the_retry_needs_nothing_of_redis() -> None:
    world = with_a_dead_ticket()
    world.server.ask_for_retry(1)
    world.answer(0)
    world.answer(2)
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.plan()
    before = prompts_by_number(world)
    world.commit()
    world.server.flush()
    world.start()
    world.plan()
    assert prompts_by_number(world) == before
    assert world.server.retried == {5: 1}


def test_after_the_server_lost_everything_the_learner_tells_it_which_tickets_are_retries() -> None:
    world = with_a_dead_ticket()
    world.commit()
    world.server.ask_for_retry(1)
    world.answer(0)
    world.answer(2)
    plan = world.plan()
    assert plan is not None
    world.train(plan)
    world.plan()
    world.answer(5)
    world.answer(3)
    retry = world.plan()
    assert retry is not None
    world.train(retry)
    world.plan()
    meant = {number: ticket.prompt_index for number, ticket in world.tickets().items()}
    world.server.flush()
    world.plan()  # 5 is trained, and not committed
    world.start()
    world.plan()
    assert {number: prompts_by_number(world)[number] for number in meant} == meant
    assert world.tickets()[5].retry_of == 1


def test_a_number_that_was_a_retry_in_an_abandoned_lineage_is_none_in_this_one() -> None:
    world = FeedWorld(ONE_ATTEMPT, num_prompts=20)
    world.server.retried = {4: 2}
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3, 4], "it was issued, and is asked for again"
    assert world.tickets()[4].retry_of == 2

    world = FeedWorld(ONE_ATTEMPT, num_prompts=20)
    world.server.retried = {8: 2}
    world.plan()
    assert sorted(world.tickets()) == [0, 1, 2, 3], "beyond a gap of more than a window nothing counts"
    while 8 not in world.tickets():
        world.answer_all()
        plan = world.plan()
        if plan is not None:
            world.train(plan)
    assert world.tickets()[8].retry_of is None
    assert world.server.retried == {}


def test_a_request_that_comes_at_the_end_of_the_data_keeps_the_run_going() -> None:
    world = with_a_dead_ticket(num_prompts=4)
    world.answer_all()
    trained: list[int] = []
    while (plan := world.plan()) is not None and plan.kind is Kind.STEP:
        trained += planned(plan)
        world.server.ask_for_retry(1)
        world.train(plan)
    world.answer_all()
    trained += world.run_to_end()
    assert Counter(trained) == {0: 1, 2: 1, 3: 1, 4: 1}


def test_a_drain_repeats_nothing_more() -> None:
    world = with_a_dead_ticket(num_prompts=4)
    world.server.ask_for_retry(1)
    world.server.control = "drain"
    world.answer_all()
    kinds = []
    while (plan := world.plan()) is not None:
        kinds.append(plan.kind)
        if plan.kind is not Kind.STEP:
            break
        world.train(plan)
    assert kinds[-1] is Kind.END
    assert world.server.retry_requests == {1}
