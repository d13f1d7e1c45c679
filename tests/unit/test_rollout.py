"""The worker's loop, on doubles of everything around it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import EngineError, LoadRejected, RewardError, RunGone, SampleError, TransportError
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.wire.branches import MAX_KEPT_TOKENS, Branch
from streamrl.protocol.wire.group import decode_header
from streamrl.protocol.wire.ticket import Ticket
from streamrl.versions import make_version
from streamrl.workers.engines.base import Engine, Load, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.sessions.trace import Played, Trace
from tests.worker_world import FIRST_VERSION, WorkerWorld


async def test_a_ticket_becomes_a_group_with_all_that_the_learner_needs() -> None:
    world = WorkerWorld()
    ticket = world.put(7, num_samples=3, attempt=1, fields={"answer": "12"})
    world.start()

    (group,) = await world.delivered(1)
    await world.finish()

    header = group.header
    assert (header.ticket, header.attempt, header.worker, header.fingerprint) == (7, 1, "0", "model")
    assert header.sample_lengths == (4, 4, 4)
    assert header.sample_rewards == (8.0, 8.0, 8.0)
    assert header.min_version == header.max_version == FIRST_VERSION
    assert group.prompt_ids.tolist() == ticket.token_ids.tolist()
    assert group.samples[0].mask_runs == (4,)
    assert group.samples[0].rewards == {"made_up": 4.0}
    assert [item.fields for item in world.reward.items] == [{"answer": "12"}] * 3


async def test_no_ticket_is_taken_before_the_engine_serves_a_version() -> None:
    world = WorkerWorld()
    world.put(1)

    async def never(engine: object) -> None:
        await asyncio.Event().wait()

    world.weights.follow = never  # type: ignore[method-assign]
    world.start()
    await world.until(lambda: world.progress.report().doing == "weights", "the worker waits for weights")

    assert world.tickets.waiting
    await world.finish()


async def test_a_ticket_waits_for_its_version_and_others_do_not() -> None:
    world = WorkerWorld()
    world.put(1, min_version=make_version(1, 5))
    world.put(2)
    world.start()

    (first,) = await world.delivered(1)
    assert first.header.ticket == 2

    await world.weights.serve(make_version(1, 6), step=6)
    _, second = await world.delivered(2)
    await world.finish()
    assert second.header.min_version == make_version(1, 6)


async def test_tokens_from_before_and_after_a_load_carry_their_versions() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True))
    world.put(1, num_samples=2)
    world.start()
    await world.until(lambda: len(world.engine.requests) == 2, "both samples are in flight")

    await world.weights.serve(make_version(1, 1), step=1)
    world.engine.release()
    (group,) = await world.delivered(1)
    await world.finish()

    spans = [(span.version, span.step, span.start, span.end) for span in group.samples[0].spans]
    assert spans == [(FIRST_VERSION, 0, 0, 2), (make_version(1, 1), 1, 2, 4)]
    assert (group.header.min_version, group.header.max_version) == (FIRST_VERSION, make_version(1, 1))


async def test_a_group_waits_until_the_version_that_made_it_is_proved() -> None:
    world = WorkerWorld()
    world.weights.unproved.add(FIRST_VERSION)
    world.put(1)
    world.start()
    await world.until(lambda: world.engine.stats().num_made == 8, "the samples are made")
    assert not world.tickets.delivered

    await world.weights.prove(FIRST_VERSION)
    await world.delivered(1)
    await world.finish()


async def test_what_was_made_under_a_version_that_was_refused_is_not_delivered() -> None:
    world = WorkerWorld()
    refused = asyncio.Event()

    async def follow(engine: Engine) -> None:
        await engine.load(Load(weights=Path("mirror"), version=FIRST_VERSION, step=0))
        world.weights.unproved.add(FIRST_VERSION)
        world.weights.version = FIRST_VERSION
        await refused.wait()
        raise LoadRejected("the canary is off")

    world.weights.follow = follow  # type: ignore[method-assign]
    world.put(1)
    task = world.start()
    await world.until(lambda: world.engine.stats().num_made == 8, "the samples are made")
    refused.set()
    with pytest.raises(LoadRejected):
        await task
    assert world.tickets.handed_back == [1]
    assert not world.tickets.delivered


def refuse_some(count: int) -> EngineDouble:
    """Refuses the first `count` samples."""
    left = [count]

    def trouble(request: SampleRequest) -> SampleError | None:
        left[0] -= 1
        return SampleError("too long") if left[0] >= 0 else None

    return EngineDouble(trouble=trouble)


async def test_a_group_with_enough_survivors_goes_out_without_the_failed_sample() -> None:
    world = WorkerWorld(engine=refuse_some(1), min_survivors=2)
    world.put(1, num_samples=3)
    world.start()

    (group,) = await world.delivered(1)
    await world.finish()

    assert len(group.samples) == 2
    assert group.header.num_failed_samples == 1
    assert not group.header.failed


async def test_too_few_survivors_make_the_ticket_a_failure_that_says_why() -> None:
    world = WorkerWorld(engine=refuse_some(2), min_survivors=2)
    world.put(1, num_samples=3)
    world.start()

    (group,) = await world.delivered(1)
    await world.finish()

    assert group.samples == ()
    assert group.header.error == "2 of 3 samples failed: too long"
    assert world.rollout.counts.groups_failed == 1


async def test_one_sample_is_enough_for_a_ticket_that_asks_for_one() -> None:
    world = WorkerWorld(min_survivors=2)
    world.put(1, num_samples=1, purpose="eval")
    world.start()

    (group,) = await world.delivered(1)
    await world.finish()
    assert len(group.samples) == 1


async def test_evaluation_tickets_are_sampled_as_validation_says() -> None:
    world = WorkerWorld()
    world.put(1, num_samples=1, purpose="eval")
    world.put(1, num_samples=1)
    world.start()
    await world.delivered(2)
    await world.finish()

    assert {(request.sampling.greedy, request.urgent) for request in world.engine.requests} == {
        (True, True),
        (False, False),
    }


async def test_a_reward_that_cannot_be_had_is_a_failed_sample_and_never_a_number() -> None:
    def judge(item: ScoreItem) -> float:
        raise RewardError("the server is gone")

    world = WorkerWorld(judge=judge)
    world.put(1)
    world.start()

    (group,) = await world.delivered(1)
    await world.finish()
    assert group.header.failed
    assert "the server is gone" in group.header.error


async def test_a_dead_engine_costs_no_ticket() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True))
    for number in range(3):
        world.put(number)
    task = world.start()
    await world.until(lambda: len(world.engine.requests) == 6, "all samples are in flight")

    world.engine.die("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await task
    assert sorted(world.tickets.handed_back) == [0, 1, 2]
    assert not world.tickets.delivered


async def test_told_to_stop_it_finishes_what_it_can_and_hands_back_the_rest() -> None:
    engine = EngineDouble(hold=True)
    world = WorkerWorld(engine=engine, grace_s=5.0)
    world.put(1)
    task = world.start()
    await world.until(lambda: len(engine.requests) == 2, "the samples are in flight")
    world.stop.set()
    await world.until(lambda: world.progress.report().state == "stopping", "the worker stops")
    world.put(2)
    engine.release()
    await task

    assert [number for number, _, _ in world.tickets.delivered] == [1]
    assert [ticket.number for ticket in world.tickets.waiting] == [2]


async def test_tickets_that_do_not_end_within_the_grace_are_handed_back() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True), grace_s=0.05)
    world.put(1)
    world.start()
    await world.until(lambda: len(world.engine.requests) == 2, "the samples are in flight")

    await world.finish()
    assert world.tickets.handed_back == [1]
    assert world.engine.stats().in_flight == 0


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
async def test_the_worker_leaves_a_run_that_has_ended(state: str) -> None:
    world = WorkerWorld()
    task = world.start()
    await world.until(lambda: world.progress.report().doing == "tickets", "the worker waits for tickets")
    world.tickets.end(state)
    await asyncio.wait_for(task, 10)


async def test_the_worker_leaves_a_run_that_was_removed() -> None:
    world = WorkerWorld()
    task = world.start()
    world.tickets.info = None
    with pytest.raises(RunGone):
        await asyncio.wait_for(task, 10)


async def test_a_paused_run_gets_no_more_groups_until_it_goes_on() -> None:
    world = WorkerWorld()
    world.tickets.mode = "pause"
    world.put(1)
    world.start()
    await world.until(lambda: world.progress.report().doing == "resume", "the worker is paused")
    assert world.tickets.waiting
    assert world.progress.report().detail["control"] == "pause"

    world.tickets.mode = "run"
    await world.delivered(1)
    await world.finish()


async def test_a_ticket_that_another_worker_got_is_dropped() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True), lease_s=0.1)
    world.put(1)
    world.put(2)
    world.start()
    await world.until(lambda: len(world.engine.requests) == 4, "the samples are in flight")

    world.tickets.taken_away.add(1)
    await world.until(lambda: world.engine.stats().in_flight == 2, "the samples of the lost ticket are abandoned")
    world.engine.release()
    (group,) = await world.delivered(1)
    await world.finish()
    assert group.header.ticket == 2


async def test_a_group_that_comes_too_late_is_counted_and_dropped() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True))
    world.put(1)
    world.start()
    await world.until(lambda: len(world.engine.requests) == 2, "the samples are in flight")
    world.tickets.taken_away.add(1)
    world.engine.release()
    await world.until(lambda: world.rollout.counts.groups_late == 1, "the late group is counted")
    await world.finish()
    assert not world.tickets.delivered


async def test_without_redis_the_worker_ends_with_the_error() -> None:
    world = WorkerWorld()

    async def cut(leased: Leased, header: bytes, body: bytes) -> bool:
        raise TransportError("Redis is gone")

    world.tickets.deliver = cut  # type: ignore[method-assign]
    world.put(1)
    with pytest.raises(TransportError, match="Redis is gone"):
        await asyncio.wait_for(world.start(), 10)


async def test_progress_counts_what_was_delivered_and_what_failed() -> None:
    world = WorkerWorld(engine=refuse_some(1), min_survivors=1)
    world.put(1)
    world.put(2)
    world.start()
    await world.delivered(2)
    await world.finish()

    detail = world.progress.report().detail
    assert (detail["groups_delivered"], detail["groups_failed"], detail["samples_failed"]) == (2, 0, 1)
    assert (detail["groups_lately"], detail["groups_failed_lately"]) == (2, 0)
    assert {"in_flight", "tokens_per_s", "kv_used"} <= detail.keys()
    assert all(decode_header(header).worker == "0" for _, header, _ in world.tickets.delivered)


async def test_a_group_that_no_message_can_hold_is_a_failure_of_its_ticket_that_says_why() -> None:
    """Handed back instead, it would be made and refused again by one worker after another, without end."""
    world = WorkerWorld(player=Wandering())
    world.put(1, num_samples=2)
    world.put(2, num_samples=1, fields={"short": True})
    world.start()

    failed, fine = sorted(await world.delivered(2), key=lambda group: group.header.ticket)
    await world.finish()
    assert failed.samples == ()
    assert failed.header.error.startswith("the group cannot be sent: ")
    assert "num_kept_tokens" in failed.header.error
    assert failed.header.num_failed_samples == world.rollout.counts.samples_failed == 2
    assert world.rollout.counts.groups_failed == world.rollout.counts.groups_delivered == 1
    assert not fine.header.failed, "the worker goes on"
    assert world.tickets.handed_back == []


class Wandering:
    """Plays rollouts whose branches repeat more than a group may."""

    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        trace = Trace(request.prompt_ids)
        trace.take(request.prompt_ids, await engine.generate(request))
        played = trace.played("stop", 1.0)
        if ticket.fields:
            return played
        branch = Branch(start=1, row=0, keep=MAX_KEPT_TOKENS)
        return played._replace(sample=played.sample._replace(branches=(branch,)))

    def outage(self) -> None:
        pass
