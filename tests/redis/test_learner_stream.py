"""The learner's half: issuing, reading, committing, reconciling, announcing."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from streamrl.protocol.transport.entries import PagedReader, encode_report
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import set_control
from streamrl.protocol.transport.present import Present
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import START, Letter
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.ticket import Purpose, decode_ticket, encode_ticket
from streamrl.telemetry.progress import Progress
from tests.helpers import make_ticket, wait_until
from tests.redis.conftest import UID, MakeLearner


def add_groups(client: redis.Redis, keys: Keys, numbers: range | list[int], *, uid: str = "uid") -> list[str]:
    stream = keys.groups("train")
    fields = {"u": uid, "d": "asked", "t": "1-0", "b": b"b"}
    added = [client.xadd(stream, {"n": n, "h": b"h%d" % n, **fields}) for n in numbers]
    return [entry_id.decode() for entry_id in added]


def asked(learner: LearnerStream, purpose: Purpose = "train") -> list[int]:
    return [ticket.number for ticket in learner.present_tickets(purpose)]


def delivered(learner: LearnerStream, *, after: str = START) -> list[int]:
    return [group.number for group in learner.present_groups("train", after=after)]


def numbers_after(learner: LearnerStream, cursor: str) -> list[int]:
    return [entry.number for entry in learner.read("train", after=cursor, count=1000, block_ms=0)]


def test_tickets_lie_in_the_stream_of_their_purpose(learner: LearnerStream) -> None:
    learner.issue([make_ticket(n) for n in range(600)] + [make_ticket(0, purpose="eval")])
    assert asked(learner) == list(range(600))
    assert asked(learner, "eval") == [0]


def test_reading_goes_on_after_the_cursor(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    add_groups(client, keys, range(5))
    first = learner.read("train", after=START, count=3, block_ms=0)
    assert [entry.number for entry in first] == [0, 1, 2]
    assert numbers_after(learner, first[-1].id) == [3, 4]


def test_reading_waits_for_a_group_and_not_longer(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    began = time.monotonic()
    assert learner.read("train", after=START, count=1, block_ms=0) == []
    assert learner.read("train", after=START, count=1, block_ms=40) == []
    assert time.monotonic() - began < 2.0
    adding = threading.Thread(target=add_groups, args=(client, keys, range(1)))
    adding.start()
    entries = wait_until(
        lambda: learner.read("train", after=START, count=1, block_ms=5000), description="the group arrives"
    )
    adding.join()
    assert [entry.number for entry in entries] == [0]


def test_a_malformed_entry_is_read_as_nobodys(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    stream = keys.groups("train")
    for fields in ({"x": "y"}, {"n": b"\xff", "u": b"\xff"}, {"n": "9" * 40}, {"n": "-3"}, {"n": "²"}):
        client.xadd(stream, fields)
    entries = learner.read("train", after=START, count=10, block_ms=0)
    assert [entry.number for entry in entries] == [-1] * 5
    assert delivered(learner) == [-1] * 5


def test_fetching_keeps_the_order_and_shows_what_is_missing(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    ids = add_groups(client, keys, range(3))
    found = learner.fetch("train", [ids[2], "1-1", ids[0]])
    assert [entry and entry.number for entry in found] == [2, None, 0]
    assert learner.fetch("train", []) == []


def test_a_rank_that_claimed_nothing_may_fetch(
    make_learner: MakeLearner, learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    [entry_id] = add_groups(client, keys, range(1))
    other_rank = make_learner(claim=False)
    [entry] = other_rank.fetch("train", [entry_id])
    assert entry is not None
    assert entry.header == b"h0"


def test_a_commit_trims_exactly_below_the_carry_and_notes_the_cursor(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    ids = add_groups(client, keys, range(300))
    carry, cursor = ids[150], ids[199]
    learner.commit(step=7, cursor=cursor, trim_below=carry)
    assert delivered(learner) == list(range(150, 300))
    assert [entry and entry.number for entry in learner.fetch("train", [carry])] == [150]
    assert client.hmget(keys.meta, "step", "cursor") == [b"7", cursor.encode()]
    learner.commit(step=7, cursor=cursor, trim_below=carry)
    assert len(delivered(learner)) == 150


def test_a_commit_removes_what_has_ended_among_the_carry(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    ids = add_groups(client, keys, range(6))
    for _ in range(2):
        learner.commit(step=1, cursor=ids[4], trim_below=ids[1], ended=[ids[2], ids[4], "1-1"])
        assert delivered(learner) == [1, 3, 5]


def test_the_counter_of_tickets_goes_along_with_them_once_the_learner_has_looked(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(3)])
    assert client.hget(keys.meta, "issued") is None, "others may lie there, too"
    learner.count_issued(4)
    learner.issue([make_ticket(n) for n in (2, 4, 5)] + [make_ticket(99, purpose="eval")])
    assert client.hget(keys.meta, "issued") == b"6"
    learner.count_issued(5)
    assert client.hget(keys.meta, "issued") == b"5"
    make_learner(term=2)
    assert client.hget(keys.meta, "issued") == b"5", "what was issued is there as long as nobody has looked"


def test_of_a_ticket_that_repeats_a_dead_one_redis_knows_which(
    learner: LearnerStream, make_learner: MakeLearner, client: redis.Redis
) -> None:
    learner.issue([make_ticket(5, retry_of=2), make_ticket(6), make_ticket(0, purpose="eval")])
    assert learner.retried() == {5: 2}
    learner.issue([make_ticket(6, retry_of=3), make_ticket(5)])
    assert learner.retried() == {6: 3}, "another lineage may use numbers otherwise"
    client.flushall()
    learner.restore(cursor=START, retried={6: 3, 9: 6})
    assert make_learner(term=2).retried() == {6: 3, 9: 6}


def test_tickets_that_cannot_be_read_or_are_of_another_run_are_told_apart(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    stream = keys.tickets("train")
    [(_, fields)] = client.xrange(stream)
    client.xadd(stream, {**fields, "n": "1"})
    client.xadd(stream, {**fields, "b": b"\xff"})
    client.xadd(stream, {"n": "2", "u": "another", "b": encode_ticket(make_ticket(2, run_uid="another"))})
    client.xadd(stream, {"x": "y"})
    present = learner.present_tickets("train")
    found = [(ticket.number, ticket.sound) for ticket in present]
    assert found == [(0, True), (1, False), (0, False), (-1, False), (-1, False)]
    assert [ticket.flaw for ticket in present[:3]] == [
        None,
        "the ticket and its stream entry differ in number, purpose, run or request",
        "not a message: Expected `object`, got `int`",
    ]


def test_evaluation_groups_are_trimmed_apart(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    train = add_groups(client, keys, range(2))
    first, second = (client.xadd(keys.groups("eval"), {"n": n, "u": "uid", "t": "1-0"}) for n in range(2))
    learner.trim_eval(below=second.decode())
    assert [(g.entry_id, g.number) for g in learner.present_groups("eval", after=START)] == [(second.decode(), 1)]
    assert first != second
    assert len(delivered(learner)) == len(train)


@pytest.mark.parametrize(
    ("num_bytes", "num_groups", "num_pages"),
    [(1 << 10, 2000, 8), (2 << 20, 10, 5), (10 << 20, 3, 4)],
    ids=["small", "large", "larger than a page"],
)
def test_groups_are_listed_in_pages_of_few_megabytes(
    learner: LearnerStream, client: redis.Redis, keys: Keys, num_bytes: int, num_groups: int, num_pages: int
) -> None:
    """For the server copies whole groups to list them."""
    with client.pipeline(transaction=False) as pipe:
        for n in range(num_groups):
            pipe.xadd(keys.groups("train"), {"n": n, "u": UID, "t": "1-0", "b": bytes(num_bytes)})
        pipe.execute()
    pages: list[list[int]] = []

    def ask(what: str, call: Callable[[], Any]) -> Any:
        _, page = reply = call()
        pages.append([size for *_, size in page])
        return reply

    listed = Present(client, keys, run_uid=UID, ask=ask).groups("train", after=START)
    assert [group.number for group in listed] == list(range(num_groups))
    assert all(sum(page) <= 8 << 20 or len(page) == 1 for page in pages)
    assert len(pages) == num_pages


def test_present_groups_lists_those_beyond_the_cursor_and_which_are_this_runs(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    ids = add_groups(client, keys, range(250))
    add_groups(client, keys, [900], uid="another run")
    found = learner.present_groups("train", after=ids[9])
    assert [(group.entry_id, group.number) for group in found[:-1]] == [(ids[n], n) for n in range(10, 250)]
    assert [group.num_bytes for group in found[:2]] == [len(b"h10" + b"b"), len(b"h11" + b"b")]
    assert found[-1].number == -1


async def test_deleted_tickets_leave_nothing_pending(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(n) for n in range(3)])
    await worker.lease(max_tickets=2, block_ms=0)
    present = learner.present_tickets("train")
    learner.delete_tickets("train", [present[0].entry_id, present[2].entry_id])
    assert asked(learner) == [1]
    assert client.xpending(keys.tickets("train"), WORKERS)["pending"] == 1
    learner.delete_tickets("eval", [])


def test_new_groups_land_beyond_the_cursor_on_a_server_that_lost_them(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    ahead = f"{int(time.time() * 1000) + 3_600_000}-5"
    client.flushall()
    learner.restore(cursor=ahead)
    [entry_id] = add_groups(client, keys, range(1))
    assert numbers_after(learner, ahead) == [0], f"{entry_id} lies behind {ahead}"


def test_new_groups_land_beyond_the_cursor_of_a_server_with_a_slower_clock(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    add_groups(client, keys, range(2))
    ahead = f"{int(time.time() * 1000) + 3_600_000}-0"
    learner.restore(cursor=ahead)
    add_groups(client, keys, [2])
    assert numbers_after(learner, ahead) == [2]


def test_restoring_changes_nothing_that_is_there(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    learner.issue([make_ticket(0)])
    ids = add_groups(client, keys, range(3))
    learner.restore(cursor=ids[1])
    assert numbers_after(learner, START) == [0, 1, 2]
    assert asked(learner) == [0]


async def test_restoring_forgets_idle_consumers_but_never_one_with_leases(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    await worker.lease(max_tickets=1, block_ms=0)
    learner.restore(cursor=START)
    assert [one["name"] for one in client.xinfo_consumers(keys.tickets("train"), WORKERS)] == [b"w"]


def test_dead_letters_carry_their_tickets_and_lie_there_until_they_are_removed(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    tickets = [make_ticket(n, run_uid=UID, attempt=3) for n in range(150)]  # more than go in a call
    assert learner.letters.put((ticket, Letter(f"error {ticket.number}", 7.5)) for ticket in tickets)
    found = learner.letters.present()
    assert [letter.number for letter in found] == list(range(150))
    fields = client.xrange(keys.dead)[4][1]
    assert decode_ticket(fields[b"b"]).attempt == 3
    assert (fields[b"p"], fields[b"error"], fields[b"at"]) == (b"train", b"error 4", b"7.5")
    client.hset(keys.retry_requests, mapping={"0": found[0].entry_id, "1": found[1].entry_id})
    learner.letters.remove([letter.entry_id for letter in found[2:]], requests=[0])
    assert [letter.number for letter in learner.letters.present()] == [0, 1]
    assert client.hkeys(keys.retry_requests) == [b"1"]


def test_a_letter_that_is_put_again_has_the_request_that_its_ticket_had_and_is_purged_no_more(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    client.hset(keys.retry_requests, "4", "1-1")
    client.sadd(keys.purged, 4, 5)
    learner.letters.put([(make_ticket(4, run_uid=UID), Letter("x", 1.0))])
    [letter] = learner.letters.present()
    assert client.hget(keys.retry_requests, "4") == letter.entry_id.encode()
    assert learner.letters.purged() == {5}


def test_records_keep_finite_numbers_only(learner: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    learner.record(3, {"train_optim/loss": 0.5, "policy/entropy": math.nan, "policy/ratio_max": math.inf})
    [record] = snapshot(client, keys).records
    assert (record.step, record.term, dict(record.values)) == (3, 1, {"train_optim/loss": 0.5})


def test_telemetry_that_fails_does_not_stop_the_learner(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    client.set(keys.events, "not a stream")
    client.set(keys.metrics, "not a stream")
    learner.event("started", ranks=2)
    learner.record(1, {"train_optim/loss": 0.5})


def test_the_reports_of_all_parts_are_read_with_the_servers_time(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    assert learner.reports()[1] == []
    progress = Progress(part="worker/a", role="worker")
    progress.note(rejected="off by 2, 1 is let pass", rejected_version="1.5")
    client.hset(keys.progress, "worker/a", encode_report(progress.report()))
    client.hset(keys.progress, "worker/b", b"garbage")
    at, [report] = learner.reports()
    assert abs(at - time.time()) < 5
    assert (report.part, report.detail["rejected_version"]) == ("worker/a", "1.5")


def test_a_reader_that_nobody_holds_leaves_no_connection(client: redis.Redis, keys: Keys) -> None:
    client.xadd(keys.groups("train"), {"a": "b"})
    reader = PagedReader(client, keys.groups("train"))
    assert reader.read(after=START, count=1, block_ms=None)
    connection = reader._connection
    assert connection.is_connected
    del reader
    gc.collect()
    assert not connection.is_connected


def test_the_operators_word_is_run_until_said_otherwise(
    learner: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    assert learner.orders().control == "run"
    set_control(client, keys, "drain", by="the test")
    assert learner.orders().control == "drain"
    client.hset(keys.control, "mode", "a word of tomorrow")
    assert learner.orders().control == "run"
