"""Workers of one host fetch a blob once; whoever dies, lies or fills the place up, the bytes are those of the store."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.crashpoints import CrashAt, SimulatedCrash, armed
from streamrl.errors import TransportError, WeightsError
from streamrl.held_folders import share_folder
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.workers.sharing.host import HostShare, SharedBlob, open_share
from streamrl.workers.sharing.reading import MIN_SHARED_BYTES, Sharing
from tests.helpers import wait_until
from tests.sharing_world import BLOB, PIECE, RECORD, CountingStore, fetched, record_of


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with share_folder("run", root=tmp_path) as folder:
        yield folder


@pytest.fixture
def hosts(folder: Path) -> Iterator[list[HostShare]]:
    """Two workers' hands on one folder."""
    with two_hands(folder, 1 << 20) as made:
        yield made


def test_a_blob_is_fetched_from_the_store_once_for_all_workers_of_a_host(
    store: CountingStore, hosts: list[HostShare]
) -> None:
    workers = [Sharing(store, host) for host in hosts]
    store.open.clear()
    with ThreadPoolExecutor(max_workers=2) as pool:
        got = [pool.submit(fetched, worker) for worker in workers]
        wait_until(lambda: store.num_got == 1, description="one of them asks the store")
        store.open.set()
        assert [one.result() for one in got] == [BLOB, BLOB]

    assert store.num_got == 1
    assert sorted((w.counts.store, w.counts.host) for w in workers) == [(0, len(BLOB)), (len(BLOB), 0)]


def test_a_worker_alone_on_its_host_or_with_a_small_blob_asks_the_store_and_leaves_nothing(
    store: CountingStore, folder: Path, hosts: list[HostShare]
) -> None:
    small = b"x" * (MIN_SHARED_BYTES - 1)
    store.put("run/000001/0-0-bb", small)
    assert fetched(Sharing(store, hosts[0]), record_of(small, "run/000001/0-0-bb")) == small

    hosts[1].close()
    assert fetched(Sharing(store, hosts[0])) == BLOB
    assert not list(folder.glob("*-*-16384"))


@pytest.mark.parametrize("point", ["share.begun", "share.piece"])
def test_who_dies_over_a_fetch_leaves_it_to_the_next(store: CountingStore, hosts: list[HostShare], point: str) -> None:
    """A death leaves the lock to the kernel, as an exception does here; what it put is gone on from."""
    with pytest.raises(SimulatedCrash), armed(CrashAt(point, nth=1)):  # type: ignore[arg-type]
        fetched(Sharing(store, hosts[0]))

    assert fetched(Sharing(store, hosts[1])) == BLOB


def test_a_store_that_is_away_is_this_workers_trouble_and_the_next_to_come_fetches(
    store: CountingStore, hosts: list[HostShare]
) -> None:
    class Away(MemoryStore):
        def get(self, name: str) -> bytes:
            raise TransportError("no route")

    with pytest.raises(TransportError):
        fetched(Sharing(Away(), hosts[0]))
    assert fetched(Sharing(store, hosts[1])) == BLOB


def test_a_blob_that_was_damaged_in_the_folder_is_thrown_away_and_comes_from_the_store(
    store: CountingStore, folder: Path, hosts: list[HostShare]
) -> None:
    fetched(Sharing(store, hosts[0]))
    [file] = folder.glob(f"{RECORD.digest.hex()}-*")
    with file.open("r+b") as opened:
        opened.write(b"\0" * 10)

    assert fetched(Sharing(store, hosts[1])) == BLOB
    assert not file.exists()


def test_a_blob_of_the_wrong_size_in_the_store_is_refused_and_not_shared(hosts: list[HostShare]) -> None:
    store = MemoryStore()
    store.put(RECORD.blob_name, BLOB[:-1])
    with pytest.raises(WeightsError, match=f"ends at {len(BLOB) - 1}, before {len(BLOB)} bytes"):
        fetched(Sharing(store, hosts[0]))


def test_a_store_so_slow_that_a_blob_takes_longer_than_anybodys_patience_is_asked_once(folder: Path) -> None:
    class Slow(CountingStore):
        def _counted(self, data: bytes) -> bytes:
            time.sleep(2.5 * len(data) / len(BLOB))
            return super()._counted(data)

    store = Slow()
    with two_hands(folder, 1 << 20, patience_s=2.0) as hosts, ThreadPoolExecutor(max_workers=2) as pool:
        workers = [Sharing(store, host, stretch_bytes=6 * PIECE) for host in hosts]
        assert list(pool.map(fetched, workers)) == [BLOB, BLOB]
    assert store.num_bytes == len(BLOB)


def test_a_fetcher_that_does_not_get_on_is_not_waited_for(
    store: CountingStore, folder: Path, hosts: list[HostShare]
) -> None:
    def never(shared: SharedBlob) -> None:
        raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        hosts[0].get(RECORD, never)
    [file] = folder.glob(f"{RECORD.digest.hex()}-*")
    stopped = os.open(file, os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    try:
        worker = Sharing(store, hosts[1])
        assert fetched(worker) == BLOB
        assert worker.counts.store == len(BLOB)
    finally:
        os.close(stopped)


def test_the_oldest_blobs_go_for_new_ones_and_what_does_not_fit_is_not_shared(folder: Path) -> None:
    share_bytes = 2 * (len(BLOB) + RECORD.num_pieces)
    with two_hands(folder, share_bytes) as (host, _):
        store = CountingStore()
        worker = Sharing(store, host)
        records = []
        for number in range(3):
            blob = bytes([number]) * len(BLOB)
            records.append(record_of(blob, f"run/000001/{number}-0-aa"))
            store.put(records[-1].blob_name, blob)
            assert fetched(worker, records[-1]) == blob
        assert not list(folder.glob(f"{records[0].digest.hex()}-*"))
        assert sum(len(list(folder.glob(f"{one.digest.hex()}-*"))) for one in records) == 2

        large = bytes(share_bytes + 1)
        store.put("run/000002/0-0-aa", large)
        assert fetched(worker, record_of(large, "run/000002/0-0-aa")) == large
        assert sum(path.stat().st_size for path in folder.iterdir()) <= share_bytes


@contextmanager
def two_hands(folder: Path, share_bytes: int, *, patience_s: float = 0.2) -> Iterator[list[HostShare]]:
    """Of two workers, on one folder."""
    made = [HostShare(folder, share_bytes=share_bytes, patience_s=patience_s) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def test_a_blob_of_some_minutes_ago_goes_when_the_next_comes(
    store: CountingStore, folder: Path, hosts: list[HostShare]
) -> None:
    worker = Sharing(store, hosts[0])
    fetched(worker)
    [old] = folder.glob(f"{RECORD.digest.hex()}-*")
    os.utime(old, (0, 0))
    other = record_of(BLOB[::-1], "run/000001/1-0-aa")
    store.put(other.blob_name, BLOB[::-1])
    assert fetched(worker, other) == BLOB[::-1]
    assert not old.exists()


def test_a_mirror_that_needs_the_room_gets_it(store: CountingStore, folder: Path, hosts: list[HostShare]) -> None:
    fetched(Sharing(store, hosts[0]))
    hosts[0].make_room(1)
    assert list(folder.glob(f"{RECORD.digest.hex()}-*"))

    hosts[0].make_room(1 << 60)
    assert not list(folder.glob(f"{RECORD.digest.hex()}-*"))


def test_a_folder_that_went_away_costs_nothing_but_the_share(store: CountingStore, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    hosts = [HostShare(tmp_path / "share", share_bytes=1 << 20) for _ in range(2)]
    (tmp_path / "share").rename(tmp_path / "gone")
    worker = Sharing(store, hosts[0])
    worker._host.is_alone = lambda: False  # type: ignore[union-attr, method-assign]
    assert fetched(worker) == BLOB


def test_the_last_worker_of_a_host_removes_the_folder(tmp_path: Path) -> None:
    with share_folder("run", root=tmp_path) as first:
        with share_folder("run", root=tmp_path) as second:
            assert first == second
        assert first.is_dir()
    assert list(tmp_path.iterdir()) == []

    left = tmp_path / f"streamrl-share-{os.geteuid()}-dead"
    left.mkdir()
    (left / "lock").touch()
    with share_folder("run", root=tmp_path):
        assert not left.exists()


def test_nothing_is_shared_where_the_setting_says_so(store: CountingStore) -> None:
    with open_share("run", 0) as host:
        assert host is None
        assert fetched(Sharing(store, host)) == BLOB


def test_a_piece_that_is_not_what_the_record_says_is_known() -> None:
    place = RECORD.piece(2)
    assert RECORD.is_piece(2, BLOB[place])
    assert not RECORD.is_piece(1, BLOB[place])
    assert not RECORD.is_piece(2, BLOB[place.start : place.stop - 1])
    assert not replace(RECORD, pieces=b"").is_piece(0, BLOB[:PIECE])
