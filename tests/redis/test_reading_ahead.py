"""A page is read ahead: nobody sees it but by the time, and by what it must not bring back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START, Entry
from tests.helpers import wait_until
from tests.proxy import Proxy

SETTINGS = schema.Redis(reply_timeout_s=5.0, give_up_after_s=10.0)


@pytest.fixture
def reader(proxy: Proxy, keys: Keys) -> Iterator[LearnerStream]:
    with connect(proxy.url, SETTINGS) as client:
        stream = LearnerStream(client, keys, run_uid="uid", term=1, holder="job", lease_s=30.0, give_up_after_s=10.0)
        stream.claim(config_json="{}", fingerprint="model", wait_s=0.0)
        stream.restore(cursor=START)
        yield stream


def add(client: redis.Redis, keys: Keys, numbers: range) -> None:
    for number in numbers:
        client.xadd(keys.groups("train"), {"n": number, "u": "uid", "h": b"header", "b": b"body"})


def read(stream: LearnerStream, *, after: str, count: int) -> list[Entry]:
    return stream.read("train", after=after, count=count, block_ms=0)


def num_reads(client: redis.Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"])


def test_the_page_behind_a_full_one_is_asked_for_at_once_and_handed_out_in_parts(
    reader: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    add(client, keys, range(12))
    before = num_reads(client)
    first = read(reader, after=START, count=5)
    wait_until(lambda: num_reads(client) == before + 2, description="the second page is asked for")
    parts = [first]
    for count in (2, 3, 5):
        parts.append(read(reader, after=parts[-1][-1].id, count=count))
    assert [[entry.number for entry in part] for part in parts] == [[0, 1, 2, 3, 4], [5, 6], [7, 8, 9], [10, 11]]
    assert read(reader, after=parts[-1][-1].id, count=5) == []


def test_a_reader_who_has_all_there_is_asks_for_nothing(reader: LearnerStream, client: redis.Redis, keys: Keys) -> None:
    add(client, keys, range(3))
    before = num_reads(client)
    [*_, last] = read(reader, after=START, count=5)
    assert num_reads(client) == before + 1
    add(client, keys, range(3, 4))
    assert [entry.number for entry in read(reader, after=last.id, count=5)] == [3]


def test_a_reader_who_begins_again_elsewhere_gets_what_is_there(
    reader: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    add(client, keys, range(6))
    read(reader, after=START, count=2)
    again = read(reader, after=START, count=3)
    assert [entry.number for entry in again] == [0, 1, 2]
    assert [entry.number for entry in read(reader, after=again[-1].id, count=3)] == [3, 4, 5]


@pytest.mark.parametrize("num_handed_out", [0, 1])
def test_what_was_read_ahead_is_not_handed_out_after_a_restore(
    num_handed_out: int, reader: LearnerStream, client: redis.Redis, keys: Keys
) -> None:
    """The server may have been emptied meanwhile, and reconciling went by what it has now."""
    add(client, keys, range(4))
    [*_, last] = read(reader, after=START, count=2)
    if num_handed_out:
        [last] = read(reader, after=last.id, count=1)
    client.xtrim(keys.groups("train"), maxlen=0)
    reader.restore(cursor=last.id)
    assert read(reader, after=last.id, count=2) == []


def test_a_page_lost_on_the_way_is_read_again_and_the_trouble_is_noticed(
    reader: LearnerStream, client: redis.Redis, keys: Keys, proxy: Proxy
) -> None:
    add(client, keys, range(6))
    [*_, last] = read(reader, after=START, count=2)
    assert not reader.disturbed
    proxy.break_connections()
    assert [entry.number for entry in read(reader, after=last.id, count=2)] == [2, 3]
    assert reader.disturbed


def test_a_page_that_cannot_be_asked_for_does_not_cost_the_one_that_came(
    reader: LearnerStream, client: redis.Redis, keys: Keys, proxy: Proxy
) -> None:
    add(client, keys, range(6))
    proxy.drop_reply_to(b"XREAD", times=3)
    numbers, last = [], START
    while entries := read(reader, after=last, count=2):
        numbers += [entry.number for entry in entries]
        last = entries[-1].id
    assert numbers == list(range(6))
    assert proxy.num_dropped == 3
