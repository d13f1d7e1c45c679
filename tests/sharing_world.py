"""Hosts that fetch one blob from each other, on loopback addresses; and malicious peers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import redis

from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.peers import Peers, bitmap_of
from streamrl.protocol.weights.fetching import fetch
from streamrl.protocol.weights.format import digest_of, digests_of_pieces
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.telemetry.progress import Progress
from streamrl.workers.sharing.opening import open_sharing
from streamrl.workers.sharing.reading import MIN_SHARED_BYTES, Sharing

PIECE = 16 << 10
RUN_UID = "run-a"
NAME = f"{RUN_UID}/000001/0-0-aa"


def record_of(blob: bytes, name: str = NAME) -> ShardRecord:
    return ShardRecord(
        blob_name=name,
        num_bytes=len(blob),
        digest=digest_of(blob),
        ranges=(),
        piece_bytes=PIECE,
        pieces=digests_of_pieces(blob, PIECE),
    )


def version_of(*records: ShardRecord) -> Manifest:
    return Manifest(version=1 << 32, base=0, step=0, run_uid=RUN_UID, tensors=(), shards=records)


BLOB = np.random.default_rng(0).bytes(MIN_SHARED_BYTES + 20 * PIECE + 100)
RECORD = record_of(BLOB)


def fetched(sharing: Sharing, record: ShardRecord = RECORD) -> bytes:
    return fetch(record, sharing.reading([version_of(record)]))


class CountingStore(MemoryStore):
    """Counts the bytes read from it; blocks reads while it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_got = self.num_bytes = 0
        self.open = threading.Event()
        self.open.set()
        self.put(RECORD.blob_name, BLOB)

    def get(self, name: str) -> bytes:
        return self._counted(super().get(name))

    def part(self, name: str, place: slice) -> bytes:
        return self._counted(super().get(name)[place])

    def _counted(self, data: bytes) -> bytes:
        self.num_got += 1
        assert self.open.wait(10), "the store was never opened"
        self.num_bytes += len(data)
        return data


class Hosts:
    """Hosts of one run with one worker each; must be closed."""

    def __init__(self, root: Path, store: MemoryStore, client: redis.Redis, keys: Keys) -> None:
        self._root, self._store, self._client, self._keys = root, store, client, keys
        self._stack = ExitStack()
        self.progress: list[Progress] = []
        client.hset(keys.meta, "uid", RUN_UID)

    def add(self, *, store: MemoryStore | None = None) -> Sharing:
        number = len(self.progress)
        self.progress.append(Progress(part=f"worker/{number}", role="worker"))
        root = self._root / str(number)
        root.mkdir()
        return self._stack.enter_context(
            open_sharing(
                store or self._store,
                self._client,
                self._keys,
                run_uid=RUN_UID,
                share_bytes=1 << 24,
                peers=f"127.0.0.{number + 2}:0",
                progress=self.progress[number],
                root=root,
            )
        )

    def says(self, address: str, pieces: Sequence[int], *, most: int = 0) -> None:
        """Report to Redis as a peer at this address would."""
        Peers(self._client, self._keys, run_uid=RUN_UID, address=address).exchange(
            RECORD.digest.hex(),
            have=bitmap_of(pieces, RECORD.num_pieces),
            num_pieces=RECORD.num_pieces,
            taken=(),
            most=most,
        )

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Ill:
    """A malicious peer, and the requests that it has received."""

    address: str
    asked: list[bytes]


@contextmanager
def ill_peer(answer: Callable[[socket.socket], None], *, host: str = "127.0.0.1") -> Iterator[Ill]:
    listener = socket.create_server((host, 0))
    ill = Ill(f"{host}:{listener.getsockname()[1]}", [])
    ended = threading.Event()

    def serve(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            ill.asked.append(client.recv(1 << 16))
            answer(client)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while not ended.is_set():
                client, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(client,), daemon=True))
                threads[-1].start()

    threads = [threading.Thread(target=accept, daemon=True)]
    threads[0].start()
    try:
        yield ill
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(10)
