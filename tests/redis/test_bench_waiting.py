"""What benches call starved: a learner that asks for groups while none lies in the stream, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bench.scale_run import Size
from bench.waiting import TimedStream, starved
from streamrl.config import schema
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Entry
from tests.helpers import wait_until
from tests.redis.conftest import UID

_BLOCK_MS = 5000
_CLOCK_S = 0.002  # the server tells milliseconds


@pytest.fixture
def stream(client: redis.Redis, keys: Keys) -> TimedStream:
    made = TimedStream(client, keys, run_uid=UID, term=1, holder="bench", lease_s=30.0)
    made.claim(config_json="{}", fingerprint="model", wait_s=0.0)
    made.restore(cursor="0-0")
    return made


def add_group(client: redis.Redis, keys: Keys) -> int:
    """In which millisecond it came."""
    entry_id: bytes = client.xadd(keys.groups("train"), {"n": "0", "u": UID, "h": b"header", "b": b"body"})
    return int(entry_id.partition(b"-")[0])


def read(stream: TimedStream, *, block_ms: int = _BLOCK_MS) -> int:
    return len(stream.read("train", after="0-0", count=1, block_ms=block_ms))


def test_a_read_of_what_lies_there_is_a_call(stream: TimedStream, client: redis.Redis, keys: Keys) -> None:
    came = add_group(client, keys)
    wait_until(lambda: 1e3 * time.time() > came + 1, description="that millisecond is over")
    assert read(stream) == 1
    assert stream.starved_s == 0
    assert stream.calls_s > 0


def test_a_read_is_starved_until_a_group_comes(stream: TimedStream, client: redis.Redis, keys: Keys) -> None:
    came: list[int] = []

    def add_once_the_read_waits() -> None:
        wait_until(lambda: client.info("clients")["blocked_clients"], description="the read waits")
        came.append(add_group(client, keys))

    later = threading.Thread(target=add_once_the_read_waits)
    asked = time.time()
    later.start()
    assert wait_until(lambda: read(stream), description="the group") == 1
    answered = time.time()
    later.join()
    assert 0 < stream.starved_s <= came[0] / 1e3 - asked + _CLOCK_S
    assert stream.starved_s + stream.calls_s <= answered - asked


def test_a_read_to_which_nothing_comes_is_starved_all_the_time(stream: TimedStream) -> None:
    assert read(stream, block_ms=50) == 0
    assert stream.starved_s >= 0.05
    assert stream.calls_s == pytest.approx(0, abs=_CLOCK_S)


@pytest.mark.parametrize(
    ("came", "seconds"), [(9_999, 0.0), (10_000, 0.001), (10_300, 0.301), (10_999, 0.999), (12_000, 0.999)]
)
def test_the_first_group_decides_and_a_read_is_not_starved_for_longer_than_it_takes(came: int, seconds: float) -> None:
    entries = [Entry(id=f"{ms}-0", number=0, run_uid=UID, header=b"", body=b"") for ms in (came, came + 500)]
    assert starved(10.0, 10.999, entries) == pytest.approx(seconds)


@pytest.fixture
def size(tmp_path: Path) -> Iterator[Size]:
    with EmbeddedRedis.start(tmp_path / "redis") as server, connect(server.url, schema.Redis()) as client:
        yield Size(server, client, 1)


@pytest.mark.long  # a measurement, which wants a moment in which nobody else is at work
@pytest.mark.parametrize(("supply", "least", "most"), [(0.5, 0.3, 1.0), (4.0, 0.0, 0.05)])
def test_a_learner_is_starved_where_its_workers_are_too_slow_and_not_where_they_are_fast(
    size: Size, supply: float, least: float, most: float
) -> None:
    def as_it_should_be() -> bool:
        paced = size.paced(groups_per_s=200.0, for_s=1.5, supply=supply)
        assert paced.groups_per_s <= 200.0 * min(supply, 1.0) * 1.3
        return least <= paced.starved <= most

    wait_until(as_it_should_be, description="a quiet moment")
