"""`streamrl dead`: letters are read, repeated by the learner and purged, each once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from streamrl.learner.groups.feed import Feed
from streamrl.learner.groups.open_feed import open_feed
from streamrl.learner.groups.plan import GroupCheck
from streamrl.ops.cli.main import main
from streamrl.ops.cli.operating.operate import letter_lines
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import (
    DeadLetter,
    purge,
    read_letters,
    read_requests,
    read_retried,
    request_retries,
)
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import Letter, RunState
from streamrl.protocol.transport.worker import WorkerStream
from tests.feed_world import MODEL, drop_reason, encode_answer, encode_failure, make_config, make_prompts
from tests.helpers import make_ticket
from tests.redis.conftest import UID, MakeLearner
from tests.redis.run_world import NUM_PROMPTS, RunWorld


def make_feed(stream: LearnerStream, **changes: Any) -> Feed:
    return open_feed(
        stream=stream,
        prompts=make_prompts(12),
        config=make_config(training={"groups_per_step": 3}, worker={"max_attempts": 1}),
        run_uid=UID,
        fingerprint=MODEL,
        drop_reason=drop_reason,
        **changes,
    )


async def answer_all(worker: WorkerStream, *, failing: frozenset[int] = frozenset()) -> dict[int, int | None]:
    """Which tickets were there, and what they repeat."""
    await worker.run_info()
    seen: dict[int, int | None] = {}
    while leased := await worker.lease(max_tickets=8, block_ms=1):
        for each in leased:
            seen[each.ticket.number] = each.ticket.retry_of
            failed = each.ticket.number in failing
            header, body = encode_failure(each.ticket) if failed else encode_answer(each.ticket)
            assert await worker.deliver(each, header, body)
    return seen


def next_plan(feed: Feed) -> Any:
    return feed.plan(step=0, world_size=1, timeout_s=0.0)


@pytest.fixture
async def feed(learner: LearnerStream, worker: WorkerStream) -> Feed:
    """Tickets 1 and 2 are dead; a batch is in hand."""
    feed = make_feed(learner)
    next_plan(feed)
    await answer_all(worker, failing=frozenset({1, 2}))
    next_plan(feed)
    feed.settle(next_plan(feed), [GroupCheck.SOUND] * 3, trained=True)
    return feed


def dead(*arguments: str, keys: Keys, url: str) -> int:
    return main(["dead", *arguments, "--redis", url, "--run", keys.name])


async def test_letters_are_listed_with_their_errors_and_prompts(
    feed: Feed, keys: Keys, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert dead("ls", keys=keys, url=redis_url) == 0
    shown = capsys.readouterr().out
    assert "the engine said no" in shown
    assert "2 dead letters" in shown
    assert dead("ls", "--json", keys=keys, url=redis_url) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["ticket"], one["attempts"], one["retry_requested"]) for one in told] == [(1, 1, False), (2, 1, False)]
    assert dead("show", "--ticket", "2", keys=keys, url=redis_url) == 0
    assert json.loads(capsys.readouterr().out) == told[1]


def test_a_shown_letter_cannot_command_the_terminal(
    learner: LearnerStream, keys: Keys, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "no answer: \x9b2J\x7f Ж"
    learner.letters.put([(make_ticket(5), Letter(error, 1.0))])
    capsys.readouterr()

    assert dead("show", "--ticket", "5", keys=keys, url=redis_url) == 0

    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert shown.isascii()
    assert json.loads(shown)["error"] == error


def test_a_listed_letter_tells_what_failed_and_what_its_prompt_asks() -> None:
    error = (
        "3 of 4 samples failed: reward 'right': the function failed: ValueError: no number in 'so'" + " (x.py:1)" * 20
    )
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    prompt = f"{system}<|im_start|>user\nHow many apples?<|im_end|>\n<|im_start|>assistant\n"
    letter = DeadLetter(
        entry_id="1-0",
        number=7,
        run_uid=UID,
        purpose="train",
        ticket=make_ticket(7, prompt=prompt),
        error=error,
        at=1.0,
        retry_requested=False,
    )

    lines = list(letter_lines([letter]))

    assert lines[0].startswith("       7  3 of 4 samples failed: reward")
    assert "ValueError: no number in 'so'" in lines[0]
    assert lines[1].startswith(f"{'':10}…")
    assert "How many apples?" in lines[1]
    assert max(map(len, lines)) <= 120
    assert lines[2] == "1 dead letter"


async def test_a_retry_becomes_one_ticket_however_often_it_is_asked_for(
    feed: Feed,
    worker: WorkerStream,
    client: redis.Redis,
    keys: Keys,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    for _ in range(2):
        assert dead("retry", "--ticket", "1", "--timeout-s", "0", keys=keys, url=redis_url) == 1
    assert capsys.readouterr().out == "1 -> not yet: the request remains\n" * 2
    assert [(one.number, one.retry_requested) for one in read_letters(client, keys)] == [(1, True), (2, False)]
    next_plan(feed)
    assert (read_requests(client, keys), read_retried(client, keys)) == (set(), {1: [8]})
    assert (await answer_all(worker))[8] == 1
    capsys.readouterr()
    assert dead("retry", "--ticket", "1", "--json", keys=keys, url=redis_url) == 0
    assert json.loads(capsys.readouterr().out) == {"requested": 0, "issued": {"1": 8}}
    assert [one.number for one in read_letters(client, keys)] == [2]
    kinds = [(event.kind, event.detail.get("tickets")) for event in snapshot(client, keys).events]
    assert kinds.count(("dead_retry", "1")) == 1


@pytest.mark.parametrize(
    ("state", "training", "command"),
    [
        ("finished", {}, "streamrl up CONFIG training.max_epochs=2"),
        ("finished", {"max_steps": 1}, "streamrl up CONFIG training.max_steps=2"),
        ("stopped", {}, "streamrl up CONFIG"),
    ],
)
async def test_where_no_learner_runs_a_retry_names_what_starts_one(
    state: RunState,
    training: dict[str, int],
    command: str,
    feed: Feed,
    learner: LearnerStream,
    client: redis.Redis,
    keys: Keys,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    feed.committed(feed.state(), step=1)
    config = make_config(training={"groups_per_step": 3, **training})
    client.hset(keys.meta, "config", config.model_dump_json())
    learner.release(state)
    capsys.readouterr()
    assert dead("retry", "--ticket", "1", keys=keys, url=redis_url) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 -> not yet: the request remains",
        f"the run has ended ({state}); `{command}` resumes it",
    ]


async def test_a_learner_after_a_crash_knows_the_retry_from_redis(
    feed: Feed, worker: WorkerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    state = feed.state()
    request_retries(client, keys, read_letters(client, keys), by="me")
    next_plan(feed)
    assert set(read_retried(client, keys)) == {1, 2}
    successor = make_feed(make_learner(term=2), state=state)
    next_plan(successor)
    seen = await answer_all(worker)
    assert {number: repeats for number, repeats in seen.items() if repeats is not None} == {8: 1, 9: 2}
    assert successor.metrics()["stream/retries"] == 2


async def test_a_purge_removes_letters_and_the_requests_for_them(
    feed: Feed,
    worker: WorkerStream,
    client: redis.Redis,
    keys: Keys,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    letters = list(read_letters(client, keys))
    assert request_retries(client, keys, letters, by="me") == 2
    capsys.readouterr()
    assert dead("purge", "--ticket", "2", keys=keys, url=redis_url) == 0
    assert read_requests(client, keys) == {1}
    for told in ("1 dead letters purged\n", "0 dead letters purged\n"):
        assert dead("purge", "--all", keys=keys, url=redis_url) == 0
        assert capsys.readouterr().out.splitlines()[-1] == told.strip()
    next_plan(feed)
    assert all(repeats is None for repeats in (await answer_all(worker)).values())
    assert purge(client, keys, letters, by="me") == 0
    assert feed.metrics()["stream/dead"] == 2
    purges = [event for event in snapshot(client, keys).events if event.kind == "dead_purge"]
    assert [event.detail["tickets"] for event in purges] == ["2", "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["retry"], "choose the dead tickets"),
        (["purge", "--all", "--ticket", "1"], "choose the dead tickets"),
        (["retry", "--ticket", "0"], "no dead letter for ticket 0"),
        (["show", "--ticket", "9"], "no dead letter for ticket 9"),
    ],
)
async def test_tickets_that_are_not_dead_are_one_clear_error(
    arguments: list[str], said: str, feed: Feed, keys: Keys, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dead(*arguments, keys=keys, url=redis_url) == 2
    assert said in capsys.readouterr().err


def test_a_letter_that_changed_under_our_hands_is_not_repeated(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.letters.put([(make_ticket(4), Letter("x", 1.0))])
    client.xadd(keys.dead, {"p": "eval", "n": "5", "u": UID, "b": "", "error": "it is asked for anew by itself"})
    letters = list(read_letters(client, keys))
    client.xdel(keys.dead, letters[0].entry_id)
    assert request_retries(client, keys, letters, by="me") == 0
    assert read_requests(client, keys) == set()


def test_what_strangers_write_among_the_letters_breaks_nothing(
    learner: LearnerStream, client: redis.Redis, keys: Keys, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client.xadd(keys.dead, {"x": "y"})
    client.xadd(keys.dead, {"p": "train", "n": "7", "u": "uid", "b": b"\xff", "error": "\x1b[2J", "at": "never"})
    client.xadd(keys.dead, {"p": "train", "n": "²", "u": "uid", "b": b"\xff"})
    for at in ("1.2.3", "nan", "1e3", "soon"):
        client.xadd(keys.dead, {"p": "train", "n": "8", "u": "uid", "b": b"\xff", "at": at})
    assert [letter.at for letter in read_letters(client, keys)][-4:] == [0.0, 0.0, 1000.0, 0.0]
    assert dead("ls", keys=keys, url=redis_url) == 0
    shown = capsys.readouterr().out
    assert "(unreadable)" in shown
    assert "\x1b" not in shown
    assert dead("show", "--ticket", "7", keys=keys, url=redis_url) == 0
    client.hset(keys.retry_requests, mapping={"x": "y", "3": "1-1"})
    client.hset(keys.retried, mapping={"x": "y", "3": "9", "9": "3"})
    assert learner.orders().retries == (3,)
    assert learner.retried() == {9: 3}


async def test_the_audit_accounts_for_retries_over_a_crash(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> None:
    world = RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)
    failing = frozenset({1, 2})
    await world.train_steps(2, failing=failing)
    world.learner.commit()
    letters = list(read_letters(client, keys))
    assert [letter.number for letter in letters] == [1, 2]
    request_retries(client, keys, letters, by="me")
    await world.train_steps(1, failing=failing)
    assert world.audit().clean
    world.restart()  # the learner knew of the retries, its checkpoint does not
    await world.train_steps(100)
    world.learner.commit()
    audit = world.audit()
    assert audit.clean, audit.to_json()
    assert (audit.issued, audit.trained, audit.dead) == (NUM_PROMPTS + 2, NUM_PROMPTS, 2)
    assert (audit.dead_letters, audit.outstanding) == (0, 0)
