"""The learner's feed and validation on a real server, with workers that answer at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis

from streamrl.config import schema
from streamrl.errors import Fenced
from streamrl.learner.groups.feed import Feed
from streamrl.learner.groups.fetch import fetch_groups
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan
from streamrl.learner.validation.validation import Validation
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import decode_body, decode_header
from streamrl.versions import make_version
from tests.feed_world import MODEL, drop_reason, encode_answer, encode_failure, make_config, make_prompts
from tests.helpers import make_ticket
from tests.redis.conftest import UID, MakeLearner

NUM_PROMPTS = 11


def make_feed(
    stream: LearnerStream,
    *,
    term: int = 1,
    state: FeedState | None = None,
    num_prompts: int = NUM_PROMPTS,
    **sections: Any,
) -> Feed:
    feed = open_feed(
        stream=stream,
        prompts=make_prompts(num_prompts),
        config=make_config(training={"groups_per_step": 3}, **sections),
        run_uid=UID,
        fingerprint=MODEL,
        drop_reason=drop_reason,
        state=state,
    )
    feed.note_version(make_version(term, 0), 0)
    return feed


async def answer_all(worker: WorkerStream, *, failing: int = -1, num_tokens: int = 4) -> None:
    await worker.run_info()
    while leased := await worker.lease(max_tickets=8, block_ms=1):
        for each in leased:
            fails = each.ticket.number == failing
            header, body = encode_failure(each.ticket) if fails else encode_answer(each.ticket, num_tokens=num_tokens)
            assert await worker.deliver(each, header, body)


async def run_to_end(feed: Feed, stream: LearnerStream, worker: WorkerStream, *, failing: int = -1) -> list[int]:
    trained: list[int] = []
    for step in range(100):
        plan = feed.plan(step=0, world_size=2, timeout_s=0.0)
        if plan is not None and plan.kind is Kind.END:
            return trained
        if plan is not None:
            entries = stream.fetch("train", [entry.entry_id for entry in plan.entries])
            groups = [decode_body(decode_header(entry.header), entry.body) for entry in entries if entry is not None]
            assert [group.header.ticket for group in groups] == [entry.ticket for entry in plan.entries]
            feed.settle(plan, [GroupCheck.SOUND] * len(groups), trained=True)
            trained += [group.header.ticket for group in groups]
            state = feed.state()
            stream.commit(step=step, cursor=state.cursor, trim_below=state.trim_below)
        await answer_all(worker, failing=failing)
    raise AssertionError(f"no end in sight: {feed.metrics()}")


async def test_every_prompt_is_trained_once_and_the_streams_are_empty_at_the_end(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    assert sorted(await run_to_end(make_feed(learner), learner, worker)) == list(range(NUM_PROMPTS))
    assert client.xlen(keys.tickets("train")) == 0
    assert client.xlen(keys.groups("train")) == 0


async def test_a_ticket_that_always_fails_ends_among_the_dead_letters(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    feed = make_feed(learner)
    trained = await run_to_end(feed, learner, worker, failing=4)
    assert sorted(trained) == [n for n in range(NUM_PROMPTS) if n != 4]
    assert feed.metrics()["stream/dead"] == 1
    assert client.xlen(keys.dead) == 1


async def test_a_new_learner_goes_on_from_the_commit_and_the_old_one_is_fenced(
    learner: LearnerStream, worker: WorkerStream, make_learner: MakeLearner
) -> None:
    old = make_feed(learner)
    old.plan(step=0, world_size=1, timeout_s=0.0)
    await answer_all(worker)
    first = old.plan(step=0, world_size=1, timeout_s=0.0)
    assert first is not None
    old.settle(first, [GroupCheck.SOUND] * len(first.entries), trained=True)
    committed = old.state()
    learner.commit(step=1, cursor=committed.cursor, trim_below=committed.trim_below)
    lost = old.plan(step=1, world_size=1, timeout_s=0.0)  # trained, but never committed
    assert lost is not None

    successor = make_learner(term=2)
    feed = make_feed(successor, term=2, state=committed)
    trained = await run_to_end(feed, successor, worker)
    assert sorted(trained + [entry.ticket for entry in first.entries]) == list(range(NUM_PROMPTS))
    old.settle(lost, [GroupCheck.SOUND] * len(lost.entries), trained=True)
    with pytest.raises(Fenced):
        old.reconcile(step=1)


async def test_after_the_server_was_emptied_everything_not_trained_is_asked_for_again(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis
) -> None:
    feed = make_feed(learner)
    feed.plan(step=0, world_size=1, timeout_s=0.0)
    await answer_all(worker)
    first = feed.plan(step=0, world_size=1, timeout_s=0.0)
    assert first is not None
    feed.settle(first, [GroupCheck.SOUND] * len(first.entries), trained=True)
    client.flushall()
    learner.renew()  # notices
    trained = await run_to_end(feed, learner, worker)
    assert sorted(trained + [entry.ticket for entry in first.entries]) == list(range(NUM_PROMPTS))


async def test_a_run_stays_within_its_budget_of_bytes_and_frees_them_by_commits(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    ticket = make_ticket(0, token_ids=np.arange(3, dtype=np.int32))
    size = sum(len(part) for part in encode_answer(ticket, num_tokens=500))
    budget = 8 * size
    feed = make_feed(
        learner,
        num_prompts=60,
        redis={"max_backlog_bytes": budget},
        lag={"max_steps": 4},
        sampling={"num_samples": 2, "max_tokens": 512},
    )
    most = num_commits = num_trained = 0
    for _ in range(1000):
        plan = feed.plan(step=0, world_size=1, timeout_s=0.0)
        if plan is not None and plan.kind is Kind.END:
            break
        if plan is not None and plan.kind is Kind.COMMIT:
            feed.committed(feed.state(), step=0)
            num_commits += 1
        elif plan is not None:
            feed.settle(plan, [GroupCheck.SOUND] * len(plan.entries), trained=True)
            num_trained += len(plan.entries)
        await answer_all(worker, num_tokens=500)
        entries = client.xrange(keys.groups("train"))
        most = max(most, sum(len(fields[b"h"]) + len(fields[b"b"]) for _, fields in entries))
    assert (num_trained, num_commits >= 5) == (60, True)
    assert size * 3 <= most <= budget
    feed.committed(feed.state(), step=0)
    assert client.xlen(keys.groups("train")) == 0


async def test_a_ticket_that_no_worker_can_read_is_issued_again_and_leaves_nothing_pending(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    feed = make_feed(learner)
    feed.plan(step=0, world_size=1, timeout_s=0.0)
    stream = keys.tickets("train")
    [(entry_id, fields)] = client.xrange(stream, count=1)
    client.xdel(stream, entry_id)
    client.xadd(stream, {**fields, b"b": b"\xff not a ticket"})
    client.xadd(stream, {"nonsense": "1"})
    await worker.run_info()
    assert 0 not in [each.ticket.number for each in await worker.lease(max_tickets=8, block_ms=1)]
    feed.reconcile(step=0)
    assert [(t.number, t.sound) for t in learner.present_tickets("train") if t.number < 1] == [(0, True)]
    [again] = await worker.lease(max_tickets=8, block_ms=1)
    assert (again.ticket.number, again.ticket.attempt) == (0, 1)
    assert client.xpending(stream, WORKERS)["pending"] == client.xlen(stream)


async def test_a_group_deleted_after_it_was_planned_is_missing_and_its_ticket_comes_again(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    feed = make_feed(learner)
    feed.plan(step=0, world_size=1, timeout_s=0.0)
    await answer_all(worker)
    plan = feed.plan(step=0, world_size=1, timeout_s=0.0)
    assert plan is not None
    client.xdel(keys.groups("train"), plan.entries[1].entry_id)
    travelled = Plan.from_bytes(plan.to_bytes())  # who has read nothing yet
    fetched = fetch_groups(learner, travelled, rank=0, vocabulary=1000)
    verdicts = [GroupCheck(int(verdict)) for verdict in fetched.verdicts]
    assert verdicts == [GroupCheck.SOUND, GroupCheck.MISSING, GroupCheck.SOUND]
    feed.settle(plan, verdicts, trained=True)
    assert sorted(await run_to_end(feed, learner, worker)) == [n for n in range(NUM_PROMPTS) if n not in (0, 2)]


async def test_the_rank_that_read_a_group_trains_it_though_redis_has_lost_it(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    feed = make_feed(learner)
    feed.plan(step=0, world_size=1, timeout_s=0.0)
    await answer_all(worker)
    plan = feed.plan(step=0, world_size=1, timeout_s=0.0)
    assert plan is not None
    client.delete(keys.groups("train"))
    fetched = fetch_groups(learner, plan, rank=0, vocabulary=1000)
    assert [group.header.ticket for group in fetched.groups] == [entry.ticket for entry in plan.entries]
    assert fetched.verdicts.tolist() == [GroupCheck.SOUND] * 3
    feed.settle(plan, [GroupCheck.SOUND] * 3, trained=True)
    feed.reconcile(step=1)
    assert sorted(await run_to_end(feed, learner, worker)) == list(range(3, NUM_PROMPTS))


async def test_a_validation_gets_its_answers_and_leaves_nothing_behind(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    validation = Validation(
        stream=learner,
        prompts=make_prompts(100).rows,
        settings=schema.Validation(),
        run_uid=UID,
        term=1,
        fingerprint=MODEL,
        max_attempts=3,
        decode=str,
    )
    validation.start(step=7, version=make_version(1, 7))
    assert validation.poll() is None
    await answer_all(worker)
    assert validation.poll() is None, "the answers are taken in several rounds"
    result = validation.poll()
    assert result is not None
    assert result.complete
    assert (result.metrics["val_rollouts/num_prompts"], result.metrics["val_rollouts/rewards"]) == (100, 0.5)
    assert client.xlen(keys.groups("eval")) == client.xlen(keys.tickets("eval")) == 0
