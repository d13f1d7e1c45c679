"""Whatever Redis has lost or kept for too long: it lists the dead letters that the learner's ledger says, no others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from streamrl.ops.cli.main import main
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import purge, read_letters, read_requests, request_retries
from streamrl.protocol.transport.snapshot import snapshot
from tests.redis.conftest import MakeWorld
from tests.redis.run_world import RunWorld

DYING = frozenset({1, 2})


@pytest.fixture
async def world(make_world: MakeWorld) -> RunWorld:
    """Tickets 1 and 2 are dead, the checkpoint says."""
    world = make_world(worker={"max_attempts": 1})
    await world.train_steps(2, failing=DYING)
    world.learner.commit()
    return world


def listed(client: redis.Redis, keys: Keys) -> list[int]:
    return [letter.number for letter in read_letters(client, keys)]


def counts(world: RunWorld) -> tuple[int, int, int]:
    """By status, by the audit, and by `dead ls`."""
    audit = world.audit()
    assert audit.clean, audit.to_json()
    counts = snapshot(world.client, world.keys).num_dead, audit.dead_letters, len(listed(world.client, world.keys))
    assert world.learner.feed.metrics()["stream/dead_letters"] == counts[0]
    return counts


def dead(world: RunWorld, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["dead", *arguments, "--redis", world.url, "--run", world.keys.name]) == 0
    return json.loads(capsys.readouterr().out)


async def test_letters_that_redis_lost_are_listed_again_by_the_next_learner_and_can_be_repeated(
    world: RunWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dead(world, capsys, "ls", "--json")
    world.client.flushall()
    world.restart().plan()
    assert counts(world) == (2, 2, 2)
    assert dead(world, capsys, "ls", "--json") == before
    assert dead(world, capsys, "show", "--ticket", "2") == before[1]
    request_retries(world.client, world.keys, read_letters(world.client, world.keys), by="me")
    await world.train_steps(100)
    world.learner.commit()
    assert world.learner.feed.metrics()["stream/retries"] == 2
    assert counts(world) == (0, 0, 0)


async def test_letters_that_are_lost_under_a_learner_are_listed_again(world: RunWorld) -> None:
    world.client.delete(world.keys.dead)
    world.learner.feed.reconcile(step=world.learner.step)
    assert counts(world) == (2, 2, 2)
    world.client.flushall()
    world.learner.stream.renew()  # notices
    world.learner.plan()
    assert counts(world) == (2, 2, 2)


async def test_what_was_repeated_or_purged_is_not_listed_again(world: RunWorld) -> None:
    one, two = read_letters(world.client, world.keys)
    request_retries(world.client, world.keys, [one], by="me")
    purge(world.client, world.keys, [two], by="me")
    await world.train_steps(1)
    world.restart().plan()
    assert counts(world) == (0, 0, 0), "from a checkpoint that knows of neither"
    world.learner.commit()
    world.client.flushall()
    world.restart().plan()
    assert counts(world) == (0, 0, 0), "from one that knows of both"


async def test_the_letter_of_a_ticket_that_a_rollback_brought_back_to_life_goes(world: RunWorld) -> None:
    await world.train_steps(2, failing=frozenset({12}))
    assert listed(world.client, world.keys) == [1, 2, 12]
    world.client.delete(world.keys.groups("train"))  # and with them the word of the failure
    request_retries(world.client, world.keys, list(read_letters(world.client, world.keys))[2:], by="me")
    world.restart().plan()
    assert counts(world) == (2, 2, 2)
    await world.train_steps(100)
    world.learner.feed.reconcile(step=world.learner.step)
    world.learner.commit()
    audit = world.audit()
    assert (audit.dead, audit.trained, world.learner.feed.metrics()["stream/retries"]) == (2, 18, 0)
    assert counts(world) == (2, 2, 2)
    assert read_requests(world.client, world.keys) == set(), "nobody repeats what was trained"


async def test_a_request_outlives_the_learner_that_died_before_its_checkpoint(world: RunWorld) -> None:
    await world.train_steps(2, failing=frozenset({12}))
    request_retries(world.client, world.keys, list(read_letters(world.client, world.keys))[2:], by="me")
    world.restart()  # which asks for the ticket again, so that it dies again
    await world.train_steps(100, failing=frozenset({12}))
    world.learner.commit()
    assert world.learner.feed.metrics()["stream/retries"] == 1
    assert listed(world.client, world.keys) == [1, 2]
    assert read_requests(world.client, world.keys) == set()


async def test_an_older_copy_of_redis_does_not_bring_back_what_was_repeated(world: RunWorld) -> None:
    letters = list(read_letters(world.client, world.keys))
    copy = world.client.dump(world.keys.dead)
    assert copy is not None
    request_retries(world.client, world.keys, letters[:1], by="me")
    await world.train_steps(2)
    world.client.restore(world.keys.dead, 0, copy, replace=True)
    world.client.hset(world.keys.retry_requests, "1", letters[0].entry_id)
    world.learner.feed.reconcile(step=world.learner.step)
    await world.train_steps(2)
    world.learner.feed.reconcile(step=world.learner.step)
    assert listed(world.client, world.keys) == [2]
    assert world.learner.feed.metrics()["stream/retries"] == 1
    assert read_requests(world.client, world.keys) == set()


async def test_what_strangers_put_among_the_letters_goes_when_the_learner_looks(world: RunWorld) -> None:
    uid, keys = world.learner.uid, world.keys
    [one, _] = read_letters(world.client, keys)
    for number, run in (("many", uid), ("7", "another"), ("0", uid), (str(one.number), uid)):
        world.client.xadd(keys.dead, {"p": "train", "n": number, "u": run, "b": "rubbish", "error": "x", "at": "1"})
    world.learner.feed.reconcile(step=world.learner.step)
    assert counts(world) == (2, 2, 2)
    assert listed(world.client, keys) == [1, 2]
