"""Reports, snapshots and the operator's hand: how a run is seen and steered from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import redis.asyncio
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import TransportError, WireError
from streamrl.ops.monitor.poller import Watcher
from streamrl.protocol.transport import operator_scripts as for_reports
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.entries import decode_report, encode_report
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import remove_run, set_control
from streamrl.protocol.transport.reports import report_progress, write_reports
from streamrl.protocol.transport.script import run
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import Announcement, Letter
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.codec import pack
from streamrl.protocol.wire.group import encode_group
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import make_version
from tests.helpers import make_group, make_ticket, wait_until, wait_until_async
from tests.redis.conftest import MakeLearner, MakeWorker


def test_a_report_survives_the_wire() -> None:
    progress = Progress(part="learner/0", role="learner")
    progress.advanced(step=3, version="6.103", tokens_per_s=12.5)
    with progress.waiting(Wait.GROUPS):
        report = progress.report()
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 20, pack({}), pack({"part": "x", "role": "king"})])
def test_bytes_that_are_no_report_are_one_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_report(data)


def test_reports_follow_the_part_and_end_with_it(client: redis.Redis, keys: Keys) -> None:
    progress = Progress(part="learner/0", role="learner")
    with write_reports(client, keys, progress, period_s=0.02):
        wait_until(lambda: snapshot(client, keys).reports, description="the first report")
        progress.working("train")
        progress.advanced(step=5)
        wait_until(
            lambda: [(r.doing, r.detail) for r in snapshot(client, keys).reports] == [("train", {"step": 5})],
            description="the report of the step",
        )
    assert snapshot(client, keys).reports == ()


async def test_a_workers_reports_do_the_same(
    client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys
) -> None:
    progress = Progress(part="worker/1", role="worker")
    async with report_progress(async_client, keys, progress, period_s=0.02):
        with progress.waiting(Wait.TICKETS):

            async def waits() -> bool:
                return [(r.part, r.state, r.doing) for r in snapshot(client, keys).reports] == [
                    ("worker/1", "waiting", "tickets")
                ]

            await wait_until_async(waits, description="the wait is shown")
    assert snapshot(client, keys).reports == ()


def test_a_report_that_cannot_be_read_hides_no_other(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.progress, "rogue", b"\xff")
    client.hset(keys.progress, "worker/1", encode_report(Progress(part="worker/1", role="worker").report()))
    assert [report.part for report in snapshot(client, keys).reports] == ["worker/1"]


def test_more_than_a_thousand_parts_are_all_shown(client: redis.Redis, keys: Keys) -> None:
    parts = [f"worker/{n}" for n in range(1100)]
    for _ in range(2):
        for part in parts:
            tell(client, keys, part)
        assert {report.part for report in snapshot(client, keys).reports} == set(parts)


@pytest.mark.parametrize("num_silent", [2, 1000])
def test_a_part_that_was_killed_is_seen_for_half_a_day_or_an_hour_if_another_comes(
    client: redis.Redis, keys: Keys, num_silent: int
) -> None:
    silent = [f"worker/{n}" for n in range(num_silent)]
    living = ["worker/living", "worker/new"]

    def were_silent_for(silent_s: float) -> None:
        for part in silent:
            tell(client, keys, part)
        client.zadd(keys.reported, dict.fromkeys(silent, client.time()[0] - silent_s))

    tell(client, keys, living[0])
    were_silent_for(42_000)
    tell(client, keys, living[0])
    assert client.hlen(keys.progress) == num_silent + 1, "an operator sees in the morning who died in the night"
    were_silent_for(3500)
    tell(client, keys, living[1])
    assert client.hlen(keys.progress) == num_silent + 2
    run(client, for_reports.withdraw(keys, living[1]))
    were_silent_for(3601)
    tell(client, keys, living[1])
    assert {report.part for report in snapshot(client, keys).reports} == set(living)
    were_silent_for(43_201)
    tell(client, keys, living[0])
    assert {report.part for report in snapshot(client, keys).reports} == set(living)
    run(client, for_reports.withdraw(keys, living[0]))
    assert client.hkeys(keys.progress) == client.zrange(keys.reported, 0, -1) == [living[1].encode()]


def test_parts_of_no_known_time_do_not_grow_for_ever(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.progress, mapping={f"worker/{n}": b"old" for n in range(1000)})
    with write_reports(client, keys, Progress(part="learner/0", role="learner"), period_s=0.02):
        wait_until(lambda: client.hlen(keys.progress) == 1, description="they are forgotten")


def tell(client: redis.Redis, keys: Keys, part: str) -> None:
    run(client, for_reports.report(keys, part, encode_report(Progress(part=part, role="worker").report())))


def test_reports_that_cannot_be_written_are_logged_once_and_stop_nothing(tmp_path: Path) -> None:
    keys = Keys("x")
    progress = Progress(part="learner/0", role="learner")
    with ExitStack() as stack, capture_logs() as logs:
        first = stack.enter_context(EmbeddedRedis.start(tmp_path))
        client = stack.enter_context(connect(first.url, schema.Redis()))
        with write_reports(client, keys, progress, period_s=0.01):
            wait_until(lambda: snapshot(client, keys).reports, description="the first report")
            first.stop()
            wait_until(lambda: logs, description="a failure is logged")
            stack.enter_context(EmbeddedRedis.start(tmp_path))
            wait_until(lambda: len(logs) == 2, description="the end of the failures is logged")
            progress.advanced(step=1)
            wait_until(
                lambda: [r.detail for r in snapshot(client, keys).reports] == [{"step": 1}], description="a new report"
            )
    assert [line["event"] for line in logs] == ["reports_failing", "reports_written_again"]


def test_a_snapshot_of_nothing_says_so(client: redis.Redis, keys: Keys) -> None:
    seen = snapshot(client, keys)
    assert (seen.run, seen.holder, seen.latest_version, seen.reports, seen.records) == (None, None, None, (), ())
    assert seen.streams["train"].num_tickets == 0


@pytest.fixture
def busy(learner: LearnerStream, client: redis.Redis, keys: Keys) -> Iterator[LearnerStream]:
    learner.issue([make_ticket(n) for n in range(5)] + [make_ticket(0, purpose="eval")])
    learner.letters.put([(make_ticket(9), Letter("x", 1.0))])
    learner.announce(Announcement(version=make_version(1, 4), base=0, step=40, manifest=b"m"), keep=[])
    learner.commit(step=40, cursor="7-7", trim_below="7-7")
    for step in range(3):
        learner.record(step, {"train_optim/loss": float(step)})
    learner.event("started", ranks=2)
    learner.event("published", version="1.4")
    set_control(client, keys, "pause", by="the test")
    return learner


async def test_a_snapshot_tells_everything_at_once(
    busy: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    worker: WorkerStream = make_worker("w", lease_s=60.0)
    leased = await worker.lease(max_tickets=4, block_ms=0)
    assert await worker.deliver(leased[-1], *encode_group(make_group(leased[-1].ticket)))
    seen = snapshot(client, keys, num_records=2)
    assert seen.run is not None
    assert (seen.run.uid, seen.run.state, seen.holder, seen.control) == ("uid", "running", "job", "pause")
    assert (seen.step, seen.num_dead) == (40, 1)
    train, evaluation = seen.streams["train"], seen.streams["eval"]
    assert (train.num_tickets, train.num_leased, train.num_groups) == (4, 2, 1)
    assert (evaluation.num_tickets, evaluation.leased_by) == (1, {"w": 1})
    assert (seen.latest_version, seen.latest_version_step) == (make_version(1, 4), 40)
    assert [(record.step, record.values["train_optim/loss"]) for record in seen.records] == [(1, 1.0), (2, 2.0)]
    assert [(event.kind, event.detail) for event in seen.events] == [
        ("started", {"ranks": 2}),
        ("published", {"version": "1.4"}),
        ("control", {"mode": "pause", "by": "the test"}),
    ]
    assert seen.used_memory_bytes > 0


def test_a_snapshot_writes_nothing(busy: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    before = {key: client.dump(key) for key in client.scan_iter()}
    snapshot(client, keys)
    assert {key: client.dump(key) for key in client.scan_iter()} == before


def test_a_snapshot_without_a_server_is_one_error(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path) as server, connect(server.url, schema.Redis()) as client:
        server.stop()
        with pytest.raises(TransportError, match="could not read the run's state within"):
            snapshot(client, Keys("x"), give_up_after_s=0.1)


def test_removing_a_run_removes_every_key_of_it_and_no_other(
    busy: LearnerStream, client: redis.Redis, keys: Keys, run_name: str
) -> None:
    neighbour = Keys(f"{run_name}-2")
    client.set(neighbour.meta, "mine")
    client.set(keys.blob("a/b", 0), b"blob")
    assert remove_run(client, keys)
    assert sorted(client.scan_iter()) == sorted([neighbour.meta.encode(), keys.tombstone.encode()])


@pytest.mark.parametrize("ending", ["*", "?", "[2-3]", "\\2"])
def test_removing_takes_a_name_literally(client: redis.Redis, run_name: str, ending: str) -> None:
    odd, neighbour = Keys(f"{run_name}{ending}"), Keys(f"{run_name}2")
    client.set(neighbour.meta, "mine")
    client.set(odd.blob("a/b", 0), b"blob")
    remove_run(client, odd)
    assert list(client.scan_iter()) == [neighbour.meta.encode()]


async def test_a_worker_sees_whether_a_learner_shows_itself(
    keys: Keys, learner_client: redis.Redis, worker: WorkerStream
) -> None:
    assert await worker.learner_report() is None
    progress = Progress(part="learner/0", role="learner")
    with write_reports(learner_client, keys, progress, period_s=0.05):
        first = await wait_until_async(worker.learner_report, description="the learner reports")

        async def is_another() -> bool:
            return await worker.learner_report() not in (None, first)

        await wait_until_async(is_another, description="the report changes while the learner lives")
    assert await worker.learner_report() is None


def test_a_run_is_over_when_it_was_seen_running_and_is_no_more(
    keys: Keys, client: redis.Redis, make_learner: MakeLearner
) -> None:
    before = make_learner()
    before.release("stopped")
    watch = Watcher(client, keys, server="here")
    watch.look()
    assert not watch.is_over, "it ended before, and may be taken up any moment"
    learner = make_learner(term=2)
    watch.look()
    assert not watch.is_over
    learner.release("finished")
    watch.look()
    assert watch.is_over
    make_learner(term=3)
    watch.look()
    assert not watch.is_over
    remove_run(client, keys)
    watch.look()
    assert watch.is_over
