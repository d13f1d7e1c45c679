"""`streamrl why` against real runs: causes that lie in the flow of tickets and groups, each brought about."""

from __future__ import annotations

import time

import redis
import redis.asyncio

from streamrl.learner.groups.plan import Kind
from streamrl.protocol.transport.worker import WorkerStream
from tests.helpers import wait_until
from tests.redis.conftest import MakeWorld
from tests.redis.monitor_world import Watched


def test_workers_that_wait_for_rewards_mean_an_outage(run: Watched) -> None:
    run.learner(for_s=30)
    run.worker("rewards", state="waiting", for_s=30)
    assert run.first() == ("reward_outage", "stalled")


def test_a_source_that_is_out_means_an_outage_though_workers_generate(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker(detail={"rewards/exact/state": "0 of 1 replicas well", "rewards/exact/failed": 7})
    assert run.first() == ("reward_outage", "degraded")
    assert "exact: 0 of 1 replicas well, 7 errors" in run.view().causes[0].evidence


def test_an_environment_that_fails_is_named_with_its_words(run: Watched) -> None:
    run.learner("train", state="working")
    told = {"rewards/environment/ended_lately": 100, "rewards/environment/failed_lately": 30}
    run.worker(detail={**told, "rewards/environment/error": "the environment failed in step: KeyError: 'board'"})
    assert run.first() == ("environment_fails", "degraded")
    assert (
        "30 of the last 100; the last one: the environment failed in step: KeyError: 'board'"
        in run.view().causes[0].evidence
    )
    run.worker(detail={**told, "rewards/environment/failed_lately": 7, "rewards/environment/failed": 5000})
    assert [cause.name for cause in run.view().causes] == [], "a few are any environment's"


async def test_an_environment_that_is_slow_or_hangs_is_named_and_its_worker_is_not_stuck(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.worker.lease(max_tickets=2, block_ms=0)
    run.learner("groups", for_s=300)
    facts = {"under_way": 32, "oldest_s": 280.0, "latency_s": 40.0, "model_s": 2.0, "scored": 9, "failed": 0}
    detail = {f"rewards/environment/{name}": fact for name, fact in facts.items()}
    run.worker(for_s=300, detail={**detail, "in_flight": 2})
    assert run.first() == ("environment_is_slow", "degraded")
    told = run.view().causes[0].evidence
    assert "30 of 32 rollouts in flight, the oldest for 5m" in told
    assert "spent 40.0 s in the environment and 2.0 s in the model" in told
    assert not {"workers_stuck", "generation_is_slow"} & set(run.causes())
    run.worker(for_s=300, detail={**detail, "in_flight": 30})
    assert "environment_is_slow" not in [cause.name for cause in run.view().causes], "the model is what they wait for"


async def test_failures_of_every_ticket_name_the_error(run: Watched) -> None:
    await run.world.train_steps(3, failing=frozenset({0, 1, 2}))
    run.learner("groups")
    run.worker(detail={"groups_failed": 60, "groups_failed_lately": 2, "groups_lately": 20})
    assert "failing_tickets" not in run.causes(), "that outage is over"
    run.worker(detail={"groups_failed": 6, "groups_failed_lately": 6, "groups_lately": 6})
    assert run.first() == ("failing_tickets", "stalled")
    assert "the engine said no" in run.view().causes[0].evidence


async def test_the_byte_budget_is_named_when_no_more_tickets_go_out(make_world: MakeWorld) -> None:
    world = make_world(redis={"max_backlog_bytes": 4_000}, sampling={"max_tokens": 20, "num_samples": 2})
    run = Watched(world)
    for _ in range(20):
        plan = world.learner.plan()
        if plan is not None and plan.kind is Kind.STEP:  # the checkpoint that it asks for cannot be written
            world.learner.train(plan)
        await world.answer_all()
    counts = run.view().train
    assert (counts.tickets, counts.groups > 0) == (0, True)
    run.learner("groups")
    run.worker("tickets", state="waiting")
    assert run.first() == ("byte_budget_reached", "stalled")


async def test_groups_that_are_all_dropped_are_told_from_none_at_all(run: Watched) -> None:
    dull = frozenset(range(3, 20))
    await run.world.train_steps(1, dull=dull)
    run.record()
    for _ in range(4):
        assert run.world.learner.plan() is None
        await run.world.answer_all(dull=dull)
    run.worker()
    run.learner("groups", for_s=20)
    assert run.first() == ("", "healthy"), "a model that gets good drops many, and goes on"
    run.learner("groups", for_s=70)
    assert run.first() == ("all_groups_dropped", "stalled")
    assert "zero_variance" in run.view().causes[0].evidence
    assert "num_samples" in run.view().causes[0].remedy


async def test_a_run_that_lives_on_a_tenth_of_its_groups_is_degraded(run: Watched) -> None:
    await run.world.train_steps(1)
    metrics = {"stream/groups_trained": 10.0, "stream/groups_dropped": 190.0, "stream/dropped/stale": 190.0}
    run.record(**metrics)
    run.report("learner/0", "train")
    run.worker()
    assert run.first() == ("most_groups_dropped", "degraded")


async def test_a_ticket_that_goes_from_worker_to_worker_is_poison(
    run: Watched, async_client: redis.asyncio.Redis
) -> None:
    run.world.learner.plan()
    for number in range(3):
        victim = WorkerStream(async_client, run.world.keys, worker=f"w{number}", lease_s=0.01, give_up_after_s=5.0)
        [leased] = await victim.lease(max_tickets=1, block_ms=0)
        assert leased.ticket.number == 0
        time_out = time.monotonic() + 0.02
        wait_until(lambda end=time_out: time.monotonic() > end, description="the lease runs out")
    run.learner("train", state="working")
    run.worker(name="w2")
    assert run.first() == ("poison_ticket", "degraded")
    assert "leased 3 times" in run.view().causes[0].evidence
    run.worker(name="w2", detail={"rewards/exact/state": "0 of 1 replicas well"})
    assert [cause.name for cause in run.view().causes] == ["reward_outage"]


async def test_at_the_lag_bound_workers_wait_for_the_learner(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.answer_all()
    run.learner("train", state="working", for_s=20)
    run.worker("tickets", state="waiting", for_s=20)
    assert run.first() == ("lag_bound_reached", "healthy")
    assert "6 groups wait to be trained" in run.view().causes[0].evidence


async def test_a_learner_that_waits_for_groups_says_how_fast_they_are_made(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.worker.lease(max_tickets=2, block_ms=0)
    run.learner("groups", for_s=5)
    run.worker(detail={"tokens_per_s": 70})
    assert run.first() == ("generation_is_slow", "healthy")
    assert "1 worker generate 70 tokens/s, 2 of 6 tickets are leased" in run.view().causes[0].evidence
    run.learner("groups", for_s=500)
    assert run.first() == ("generation_is_slow", "degraded")


async def test_workers_without_tickets_are_not_the_learners_fault_while_it_cannot_publish(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.answer_all()
    run.worker("tickets", state="waiting", for_s=20)
    for doing, state in (("weights", "waiting"), ("publish", "working")):
        run.learner(doing, state=state, for_s=40)
        assert run.causes() == ["publish_stuck"]


async def test_where_all_tickets_are_leased_a_larger_bound_is_advised(run: Watched) -> None:
    run.world.learner.plan()
    run.learner("groups", for_s=5)
    run.worker(detail={"tokens_per_s": 70})
    for num_leased, advice in ((2, "raise worker.max_groups_in_flight"), (4, "raise lag.max_steps")):
        await run.world.worker.lease(max_tickets=num_leased, block_ms=0)
        assert run.first() == ("generation_is_slow", "healthy")
        assert advice in run.view().causes[0].remedy


async def test_rewards_that_take_longer_than_answers_are_the_cause_and_not_the_engine(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.worker.lease(max_tickets=6, block_ms=0)
    run.learner("groups", for_s=5)
    idle = {"rewards/exact/latency_s": 45.0, "rewards/exact/state": "well", "tokens_per_s": 0, "in_flight": 0}
    run.worker(detail=idle)
    assert run.causes() == ["rewards_are_slow"], "before the first step the sources' latency tells"
    run.record(**{"timers/generate": 6.0, "timers/reward": 90.0})
    assert run.causes() == ["rewards_are_slow"]
    assert "6.0 s to generate and 90.0 s to score; the slowest source, exact, takes 45.0 s" in (
        run.view().causes[0].evidence
    )
    assert "raise lag.max_steps" in run.view().causes[0].remedy
    run.worker(detail={**idle, "waiting": 12})
    assert run.causes() == ["generation_is_slow"], "samples queue for the engine"
    run.worker(detail=idle)
    run.record(**{"timers/generate": 90.0, "timers/reward": 6.0})
    assert run.causes() == ["generation_is_slow"]
    run.learner("groups", for_s=500)
    run.record(**{"timers/generate": 6.0, "timers/reward": 90.0})
    assert run.first() == ("rewards_are_slow", "degraded")


async def test_an_engine_that_computes_another_model_than_the_learner_is_told_of(run: Watched) -> None:
    await run.world.train_steps(1)
    for _ in range(3):
        run.world.learner.step += 1
        run.record(**{"policy/fresh_mismatch": 0.3})
    run.healthy()
    assert run.first() == ("engine_disagrees", "degraded")
    assert "0.3 apart" in run.view().causes[0].evidence


async def test_a_validation_that_ranks_nothing_is_told_of(run: Watched) -> None:
    for unanswered, causes in ((1.0, []), (57.0, ["validation_ranks_nothing"])):
        found = {"num_prompts": 200.0 - unanswered, "num_unanswered": unanswered, "ranks": float(not causes)}
        run.world.learner.step += 1
        step = run.world.learner.step
        run.world.learner.stream.record(step, {f"val_rollouts/{name}": value for name, value in found.items()})
        run.healthy()
        assert run.causes() == causes
    assert "57 of 200 prompts are unanswered:" in run.view().causes[0].evidence
    found |= {"num_unanswered": 2.0, "num_prompts": 198.0, "num_incomplete": 30.0}
    run.world.learner.step += 1
    step = run.world.learner.step
    run.world.learner.stream.record(step, {f"val_rollouts/{name}": value for name, value in found.items()})
    assert "2 of 200 prompts are unanswered, and 30 lack samples:" in run.view().causes[0].evidence


async def test_a_curriculum_with_little_to_choose_from_is_told_of(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record(**{f"curriculum/prompts/{kind}": 100.0 for kind in ("new", "fitting", "solved", "hopeless")})
    run.healthy()
    assert "few_prompts_fit" not in run.causes()
    run.world.learner.step += 1
    run.record(**{"curriculum/prompts/solved": 900.0, "curriculum/prompts/hopeless": 200.0})
    run.healthy()
    assert run.first() == ("few_prompts_fit", "degraded")
    assert "900 are solved and 200 hopeless" in run.view().causes[0].evidence


async def test_a_disk_that_refuses_the_draws_of_a_curriculum_is_told_of(run: Watched) -> None:
    run.report("learner/0", "groups", state="waiting", detail={"step": 0, "curriculum/refused": 3.0})
    run.worker()
    assert run.first() == ("draws_refused", "stalled")
    assert "3 times in a row" in run.view().causes[0].evidence


async def test_a_disk_that_takes_no_checkpoint_is_told_of(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record(**{"checkpoint/refused": 0.0})
    run.healthy()
    assert "checkpoints_refused" not in run.causes()
    run.report("learner/0", "train", state="working", detail={"step": 1, "checkpoint/refused": 2.0})
    assert run.first() == ("checkpoints_refused", "degraded")
    assert "2 checkpoints in a row failed" in run.view().causes[0].evidence


async def test_dead_letters_call_for_somebody(run: Watched) -> None:
    await run.world.train_steps(2, failing=frozenset({1}))
    run.learner("train", state="working")
    run.worker(detail={"groups_failed_lately": 2, "groups_lately": 20})
    assert run.first() == ("dead_letters", "degraded")
    assert "the engine said no" in run.view().causes[0].evidence


async def test_skipped_steps_call_for_somebody(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record(**{"train_optim/skipped_steps": 2.0})
    run.healthy()
    assert run.first() == ("steps_skipped", "degraded")


async def test_what_cannot_be_read_is_told_beside_what_can(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record()
    run.healthy()
    run.world.client.hset(run.world.keys.weights, "step", "many")
    assert run.first() == ("unreadable", "degraded")
    run.world.client.hdel(run.world.keys.meta, "uid")
    assert run.causes() == ["absent", "unreadable"]
