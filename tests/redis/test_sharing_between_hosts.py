"""Hosts fetch a blob of weights from each other: about one copy leaves the store, and no peer can do more than cost
time, whatever it answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from streamrl.errors import ConfigError, TransportError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.peers import CLAIM_S, Peers, address_of_peer, bitmap_of, pieces_of
from streamrl.workers.sharing.opening import peers_address
from tests.sharing_world import BLOB, PIECE, RECORD, RUN_UID, CountingStore, Hosts, fetched, ill_peer

EVERY = range(RECORD.num_pieces)
OF_FULL_LENGTH = EVERY[:-1]  # of which an answer's length is right


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def hosts(tmp_path: Path, store: CountingStore, client: redis.Redis, keys: Keys) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, store, client, keys)
    yield hosts
    hosts.close()


def test_hosts_that_fetch_at_once_take_about_one_copy_from_the_store(store: CountingStore, hosts: Hosts) -> None:
    workers = [hosts.add() for _ in range(4)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(fetched, workers)) == [BLOB] * 4

    assert store.num_bytes <= 1.5 * len(BLOB)
    for worker in workers:
        assert worker.counts.store + worker.counts.peers >= len(BLOB)


def test_who_comes_late_has_it_all_from_peers(store: CountingStore, hosts: Hosts) -> None:
    first, late = hosts.add(), hosts.add()
    assert fetched(first) == BLOB
    assert fetched(late) == BLOB
    assert (store.num_bytes, late.counts.store, late.counts.peers) == (len(BLOB), 0, len(BLOB))


def answer(head: str, body: bytes = b"", *, then_wait_s: float = 0.0) -> Callable[[socket.socket], None]:
    def send(client: socket.socket) -> None:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        client.settimeout(then_wait_s or 0.001)
        with suppress(TimeoutError):
            client.recv(1)

    return send


def dribble(client: socket.socket) -> None:
    """A head that never ends."""
    for _ in range(10_000):
        client.sendall(b"x")
        time.sleep(0.05)


OK = f"HTTP/1.1 200 OK\r\ncontent-length: {PIECE}"
ILL: dict[str, Callable[[socket.socket], None]] = {
    "it lies": answer(OK, b"x" * PIECE),
    "it answers a gigabyte": answer(f"HTTP/1.1 200 OK\r\ncontent-length: {1 << 30}", b"x" * (1 << 20)),
    "it stalls": answer(OK, b"x" * 100, then_wait_s=20.0),
    "it says nothing": lambda client: threading.Event().wait(5) and None,
    "it dies": answer(OK, b"x" * 100),
    "it is of another run": answer("HTTP/1.1 403 Forbidden\r\ncontent-length: 0"),
    "it has no length": answer("HTTP/1.1 200 OK", b"x" * PIECE),
    "it speaks something else": answer("SSH-2.0-OpenSSH_9.2"),
    "its head never ends": dribble,
}


@pytest.mark.parametrize("kind", ILL)
def test_a_peer_that_means_ill_costs_time_and_no_bits(store: CountingStore, hosts: Hosts, kind: str) -> None:
    worker = hosts.add()
    with ill_peer(ILL[kind]) as ill:
        hosts.says(ill.address, OF_FULL_LENGTH, most=len(EVERY))  # it took every piece on, too
        began = time.monotonic()
        assert fetched(worker) == BLOB
        took_s = time.monotonic() - began

    assert ill.asked
    assert worker.counts.store == len(BLOB)
    assert took_s < CLAIM_S + 5.0
    told = hosts.progress[0].report().detail.get("peer_lied")
    assert told == (ill.address if kind in ("it lies", "it answers a gigabyte") else None)


def test_an_ill_peer_among_sound_ones_is_left_out(store: CountingStore, hosts: Hosts) -> None:
    first, late = hosts.add(), hosts.add()
    fetched(first)
    with ill_peer(ILL["it lies"]) as ill:
        hosts.says(ill.address, EVERY)
        assert fetched(late) == BLOB
    assert len(ill.asked) <= 1
    assert late.counts.store == 0


def test_what_a_dead_host_took_on_is_given_to_the_next(store: CountingStore, client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.meta, "uid", RUN_UID)
    dead, next_ = (Peers(client, keys, run_uid=RUN_UID, address=f"10.0.0.{n}:7000") for n in (1, 2))
    digest, none = RECORD.digest.hex(), bitmap_of((), len(EVERY))
    taken = dead.exchange(digest, have=none, num_pieces=len(EVERY), taken=(), most=5).assigned
    told = next_.exchange(digest, have=none, num_pieces=len(EVERY), taken=(), most=len(EVERY))
    assert sorted([*taken, *told.assigned]) == [*EVERY]
    assert set(told.peers) == {"10.0.0.1:7000"}
    assert told.busy == set(taken)

    for piece in taken:
        client.hset(keys.claims(digest), str(piece), "1 10.0.0.1:7000")
    have = bitmap_of(told.assigned, len(EVERY))
    again = next_.exchange(digest, have=have, num_pieces=len(EVERY), taken=told.assigned, most=len(EVERY))
    assert sorted(again.assigned) == sorted(taken)
    assert not client.hgetall(keys.claims(digest)).keys() & {str(piece).encode() for piece in told.assigned}
    for key in (keys.peers(digest), keys.claims(digest)):
        assert client.pttl(key) > 0


def test_without_a_run_in_redis_pieces_come_from_the_store(
    store: CountingStore, hosts: Hosts, client: redis.Redis, keys: Keys
) -> None:
    worker = hosts.add()
    client.delete(keys.meta)
    with pytest.raises(TransportError):
        hosts.says("127.0.0.9:7000", EVERY)
    assert fetched(worker) == BLOB
    assert worker.counts.store == len(BLOB)


@pytest.mark.parametrize(
    ("address", "own", "is_peer"),
    [
        ("10.1.0.2:7000", "10.0.0.1:7000", True),
        ("[fd00::2]:7000", "[fd00::1]:7000", True),
        ("127.0.0.3:7000", "127.0.0.2:7000", True),
        ("10.0.0.1:7000", "10.0.0.1:7000", False),  # itself
        ("127.0.0.1:7000", "10.0.0.1:7000", False),  # its own inner doors
        ("169.254.169.254:8080", "10.0.0.1:7000", False),  # metadata of clouds
        ("10.0.0.2:80", "10.0.0.1:7000", False),
        ("0.0.0.0:7000", "10.0.0.1:7000", False),
        ("224.0.0.1:7000", "10.0.0.1:7000", False),
        ("8.8.8.8:7000", "10.0.0.1:7000", False),  # the world
        ("[::ffff:127.0.0.1]:7000", "10.0.0.1:7000", False),
        ("redis:7000", "10.0.0.1:7000", False),
        ("http://10.0.0.2:7000/", "10.0.0.1:7000", False),
        ("10.0.0.2:99999", "10.0.0.1:7000", False),
        ("", "10.0.0.1:7000", False),
    ],
)
def test_only_addresses_that_a_worker_may_have_are_asked(address: str, own: str, is_peer: bool) -> None:
    assert (address_of_peer(address, own=own) is not None) is is_peer


def test_a_bitmap_says_which_pieces_and_none_that_are_not() -> None:
    assert pieces_of(bitmap_of([0, 7, 8, 20], 21), 21) == {0, 7, 8, 20}
    assert pieces_of(b"\xff" * 100, 10) == set(range(10))
    assert pieces_of(b"", 10) == set()


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "[::]:7000", "worker-1:7000", "10.0.0.1"])
def test_the_address_for_peers_is_one_that_others_reach(text: str) -> None:
    with pytest.raises(ConfigError, match="--peers"):
        peers_address(text)
