"""The judge against the real thing: learners that crash, resume and are taken over, and hands that meddle."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.errors import ConfigError, Fenced, ResourceError
from streamrl.learner.groups.ledger import Ending
from streamrl.ops.audit import Audit, audit_folder
from streamrl.ops.audit.streams import read_streams
from streamrl.ops.cli.main import main
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Letter
from tests.feed_world import encode_answer
from tests.helpers import make_ticket
from tests.redis.run_world import NUM_PROMPTS, RunWorld

ALL_STEPS = 100


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    return RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)


def found_clean(audit: Audit) -> Audit:
    assert audit.clean, audit.to_json()
    return audit


async def test_a_run_is_clean_at_every_moment_and_nothing_is_outstanding_at_its_end(world: RunWorld) -> None:
    learner = world.learner
    found_clean(world.audit())
    for _ in range(4):
        await world.train_steps(1, failing=frozenset({4}), dull=frozenset({2, 9}))
        found_clean(world.audit())
        await world.train_steps(1, failing=frozenset({4}), dull=frozenset({2, 9}))
        learner.commit()
        audit = found_clean(world.audit())
        assert (audit.step, audit.learner_is_live) == (learner.step, True)
    learner.commit()
    for audit in (found_clean(world.audit()), found_clean(audit_folder(world.config.folder))):
        assert (audit.issued, audit.trained, audit.dead, audit.outstanding) == (NUM_PROMPTS, 17, 1, 0)
        assert audit.dropped == {"zero_variance": 2}
    assert (world.audit().unchecked, world.audit().dead_letters) == ((), 1)


async def test_what_ended_since_the_last_commit_is_outstanding(world: RunWorld) -> None:
    await world.train_steps(1)
    world.learner.commit()
    await world.train_steps(1)
    audit = found_clean(world.audit())
    assert audit.trained == 3
    assert audit.outstanding == audit.waiting + audit.delivered == audit.issued - 3


async def test_drops_after_the_last_step_are_committed_without_another(world: RunWorld) -> None:
    await world.train_steps(4)
    world.learner.commit()
    dull = frozenset(range(12, NUM_PROMPTS))
    assert await world.train_steps(ALL_STEPS, dull=dull) == []
    assert found_clean(world.audit()).outstanding == 8
    world.learner.commit()
    for audit in (found_clean(audit_folder(world.config.folder)), found_clean(world.audit())):
        assert (audit.trained, audit.dropped, audit.outstanding) == (12, {"zero_variance": 8}, 0)


async def test_after_crashes_every_ticket_has_ended_once_in_the_surviving_lineage(world: RunWorld) -> None:
    committed: list[int] = []
    for steps in (1, 2, 3, 1):
        committed += await world.train_steps(steps)
        world.learner.commit()
        await world.train_steps(1)  # lost in the crash
        world.restart()
        audit = found_clean(world.audit())
        assert audit.trained == len(committed) == len(set(committed))
    await world.train_steps(ALL_STEPS)
    world.learner.commit()
    audit = found_clean(world.audit())
    assert (audit.term, audit.trained, audit.outstanding, audit.wasted_steps) == (5, NUM_PROMPTS, 0, 0)


async def test_a_crash_between_journal_and_rename_leaves_no_trace(world: RunWorld) -> None:
    await world.train_steps(1)
    world.learner.commit()
    await world.train_steps(2)
    folder = world.learner.write_checkpoint(world.learner.feed.state()).folder
    folder.rename(folder.with_name(f".tmp-{folder.name}"))
    world.restart()
    assert found_clean(world.audit()).trained == 3
    await world.train_steps(ALL_STEPS)
    world.learner.commit()
    audit = found_clean(world.audit())
    assert (audit.trained, audit.wasted_steps, audit.wasted_tickets) == (NUM_PROMPTS, 2, 6)


async def test_a_crash_between_rename_and_trim_leaves_groups_that_count_for_nothing(world: RunWorld) -> None:
    await world.train_steps(2)
    world.learner.write_checkpoint(world.learner.feed.state())
    audit = found_clean(world.audit())
    assert (audit.trained, audit.leftover_groups) == (6, 6)
    world.restart()
    await world.train_steps(ALL_STEPS)
    world.learner.commit()
    audit = found_clean(world.audit())
    assert (audit.trained, audit.leftover_groups) == (NUM_PROMPTS, 0)


async def test_what_a_replaced_learner_commits_is_wasted_and_spoils_nothing(world: RunWorld) -> None:
    await world.train_steps(1)
    world.learner.commit()
    zombie = world.learner
    plan = await world.next_step()
    world.restart()
    zombie.train(plan)
    with pytest.raises(Fenced):
        zombie.commit()
    audit = found_clean(world.audit())
    assert (audit.trained, audit.wasted_steps, audit.wasted_tickets) == (3, 1, 3)
    await world.train_steps(ALL_STEPS)
    world.learner.commit()
    audit = found_clean(world.audit())
    assert (audit.trained, audit.outstanding, audit.wasted_steps) == (NUM_PROMPTS, 0, 1)


async def test_commits_while_the_audit_looks_are_not_taken_for_losses(world: RunWorld) -> None:
    await world.train_steps(1)
    world.learner.commit()
    world.restart()
    audits: list[Audit] = []
    ended = threading.Event()

    def keep_auditing() -> None:
        while not ended.is_set() or not audits:
            audits.append(world.audit())

    auditing = asyncio.create_task(asyncio.to_thread(keep_auditing))
    try:
        for _ in range(8):
            await world.train_steps(1, failing=frozenset({4, 11}))
            world.learner.commit()
    finally:
        ended.set()
        await auditing
    assert [audit.to_json() for audit in audits if not audit.clean] == []


class SlowToLook(redis.Redis):
    """Something happens after its first answer."""

    def __init__(self, client: redis.Redis, then: Callable[[], None]) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self.then: Callable[[], None] | None = then

    def hgetall(self, name: str) -> Any:
        found = super().hgetall(name)
        if self.then is not None:
            self.then, then = None, self.then
            then()
        return found


def test_tickets_issued_while_the_audit_looks_are_told_apart(world: RunWorld) -> None:
    world.learner.plan()
    uid = world.learner.uid
    client = SlowToLook(world.client, lambda: world.learner.stream.issue([make_ticket(6, run_uid=uid)]))
    seen = read_streams(client, world.keys, run_uid=uid)
    assert (seen.issued, seen.issued_since, len(seen.tickets)) == (6, 1, 7)


def test_of_two_learners_that_come_one_after_the_other_the_audit_believes_the_lower_counter(world: RunWorld) -> None:
    world.learner.plan()
    uid, client = world.learner.uid, SlowToLook(world.client, lambda: world.learner.stream.count_issued(4))
    seen = read_streams(client, world.keys, run_uid=uid)
    assert (seen.issued, seen.issued_since) == (4, 0)


# Hands that meddle


async def test_a_group_removed_by_hand_is_lost_until_the_learner_asks_again(world: RunWorld) -> None:
    await world.train_steps(1)
    world.learner.commit()
    world.learner.plan()
    await world.answer_all()
    groups = world.client.xrange(world.keys.groups("train"))
    entry_id, fields = groups[-1]
    world.client.xdel(world.keys.groups("train"), entry_id)
    audit = world.audit()
    assert (audit.lost, audit.examples) == (1, {"lost": (int(fields[b"n"]),)})
    assert not audit.balanced
    assert not audit.clean
    world.restart().plan()
    found_clean(world.audit())


async def test_a_ticket_removed_by_hand_is_lost(world: RunWorld) -> None:
    world.learner.plan()
    entry_id, _ = world.client.xrange(world.keys.tickets("train"))[2]
    world.client.xdel(world.keys.tickets("train"), entry_id)
    audit = world.audit()
    assert (audit.lost, audit.examples) == (1, {"lost": (2,)})


async def test_a_ticket_journaled_as_trained_in_two_steps_is_trained_twice(world: RunWorld) -> None:
    await world.train_steps(1)
    world.learner.commit()
    await world.train_steps(1)
    state = world.learner.feed.state()
    again = Ending(world.learner.step, "trained", 0)
    world.learner.commit(replace(state, uncommitted=(*state.uncommitted, again)))
    audit = world.audit()
    assert (audit.twice, audit.lost, audit.examples) == (1, 0, {"twice": (0,)})
    assert not audit.clean


async def test_a_ticket_that_was_read_and_forgotten_is_lost(world: RunWorld) -> None:
    """The cursor has passed its group, and no carry has it."""
    await world.train_steps(1)
    await world.answer_all()
    state = world.learner.feed.state()
    last = world.client.xrange(world.keys.groups("train"))[-1][0].decode()
    world.learner.commit(replace(state, cursor=last))
    assert world.audit().lost == 3


async def test_answers_of_a_lost_lineage_that_lie_beyond_the_counter_are_no_gap(world: RunWorld) -> None:
    """Redis has lost what was issued after the checkpoint, but for one late answer, and the learner began anew."""
    await world.train_steps(1)
    world.learner.commit()
    uid, keys = world.learner.uid, world.keys
    world.client.delete(keys.tickets("train"), keys.groups("train"))
    world.restart()
    ticket = make_ticket(17, run_uid=uid)
    header, body = encode_answer(ticket)
    delivered = {"n": "17", "u": uid, "d": ticket.identity, "t": "1-0", "h": header, "b": body}
    world.client.xadd(keys.groups("train"), delivered)
    world.learner.plan()
    audit = found_clean(world.audit())
    assert (audit.issued, audit.waiting, audit.malformed) == (9, 9 - 3, {"groups/never_issued": 1})
    await world.train_steps(ALL_STEPS)
    world.learner.commit()
    assert found_clean(world.audit()).trained == NUM_PROMPTS


async def test_malformed_and_foreign_entries_are_counted_and_change_no_sum(world: RunWorld) -> None:
    world.learner.plan()
    uid, keys = world.learner.uid, world.keys
    ticket = make_ticket(1, run_uid=uid)
    header, body = encode_answer(ticket)
    delivered: dict[str, str | bytes] = {"n": "1", "u": uid, "d": ticket.identity, "t": "1-0", "h": header, "b": body}
    for changed in (
        {"u": "another"},
        {"n": "one"},
        {"h": b"rubbish"},
        {"n": "0"},
        {"b": b"rubbish"},
        {"n": "100", "h": b"", "b": b""},
        {"t": ""},
    ):
        world.client.xadd(keys.groups("train"), {**delivered, **changed})
    world.client.xadd(keys.groups("train"), {"what": "ever"})
    world.client.xadd(keys.tickets("train"), {"n": "0", "u": uid, "b": "rubbish"})
    audit = found_clean(world.audit())
    assert audit.malformed == {
        "groups/wrong_run": 2,
        "groups/no_number": 1,
        "groups/header": 3,
        "groups/body": 1,
        "groups/not_delivered": 1,
        "groups/never_issued": 1,
        "tickets/body": 1,
    }
    assert (audit.issued, audit.waiting) == (6, 6)


async def test_a_counter_of_tickets_that_cannot_be_read_is_told_and_all_else_is_judged(world: RunWorld) -> None:
    await world.train_steps(1)
    sound = world.audit()
    world.client.hset(world.keys.meta, "issued", "many")
    audit = world.audit()
    assert audit.malformed == {"meta/issued": 1}
    assert (audit.trained, audit.outstanding, audit.lost) == (sound.trained, sound.outstanding, 0)


async def test_evaluation_is_counted_apart(world: RunWorld) -> None:
    world.learner.stream.issue([make_ticket(n, run_uid=world.learner.uid, purpose="eval") for n in range(3)])
    audit = found_clean(world.audit())
    assert (audit.issued, audit.eval_tickets, audit.eval_groups) == (0, 3, 0)


async def test_junk_is_no_letter_and_no_answer_whoever_counts(
    world: RunWorld, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    learner, keys = world.learner, world.keys
    uid, asked = learner.uid, make_ticket(0, run_uid=learner.uid, purpose="eval")
    learner.stream.issue([asked])
    learner.stream.letters.put([(make_ticket(3, run_uid=uid), Letter("x", 1.0))])
    header, body = encode_answer(asked)
    delivered = {"n": "0", "u": uid, "d": asked.identity, "t": "1-0", "h": header, "b": body}
    world.client.xadd(keys.groups("eval"), delivered)
    world.client.xadd(keys.dead, {"p": "train", "n": "4", "u": uid, "b": "rubbish"})  # of ours once, and damaged
    junk: list[dict[str, str | bytes]] = [
        {"what": "ever"},
        {"n": "many", "u": uid},
        {"n": "7", "u": "another", "h": header, "b": body},
    ]
    for fields in junk:
        for stream in (keys.dead, keys.groups("eval"), keys.tickets("eval")):
            world.client.xadd(stream, fields)
    world.client.xadd(keys.groups("eval"), {**delivered, "h": b"rubbish"})

    audit = found_clean(world.audit())

    assert (audit.dead_letters, audit.eval_tickets, audit.eval_groups) == (2, 1, 1)
    each = {"wrong_run": 2, "no_number": 1}
    kinds = {f"{what}/{flaw}": n for what in ("dead", "eval_groups", "eval_tickets") for flaw, n in each.items()}
    assert audit.malformed == {**kinds, "dead/body": 1, "eval_groups/header": 1}
    capsys.readouterr()
    assert main(["dead", "ls", "--json", "--redis", redis_url, "--run", keys.name]) == 0
    assert [letter["ticket"] for letter in json.loads(capsys.readouterr().out)] == [3, 4]


async def test_a_server_that_was_emptied_does_not_hold_the_run_until_the_learner_has_put_it_right(
    world: RunWorld,
) -> None:
    await world.train_steps(1)
    world.learner.commit()
    await world.answer_all()
    world.client.flushall()
    with pytest.raises(ResourceError, match="holds no run"):
        world.audit()
    world.learner.stream.renew()
    world.learner.plan()
    found_clean(world.audit())


async def test_another_run_of_the_same_name_is_not_audited(world: RunWorld) -> None:
    world.client.hset(world.keys.meta, "uid", "another")
    with pytest.raises(ResourceError, match="another run named"):
        world.audit()


def test_a_server_that_is_not_there_is_named(world: RunWorld, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="does not answer"):
        audit_folder(world.config.folder, redis_url=f"unix://{tmp_path}/none.sock")
    with pytest.raises(ConfigError, match="redis://"):
        audit_folder(world.config.folder, redis_url="localhost")


def test_an_audit_changes_nothing(world: RunWorld) -> None:
    world.learner.plan()

    def everything() -> dict[bytes, bytes | None]:
        return {key: world.client.dump(key) for key in world.client.scan_iter()}

    before, files = everything(), sorted(world.config.folder.rglob("*"))
    world.audit()
    assert everything() == before
    assert sorted(world.config.folder.rglob("*")) == files
