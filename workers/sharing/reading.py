"""Reads blobs for a mirror from the nearest place that has them: this host's share, other hosts, the store.

    get(name) ─► small, or nobody to share with: the store
              ├► the host's share: what is there or on its way; the rest is fetched here, from peers and the store
              └► wrong, or no room in the share: the store

A blob that is read a second time was wrong: it is discarded here and read from the store. All bytes are counted by
their origin. Blocks on each of these places, within their own bounds. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from streamrl.errors import WeightsError
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.stores import Blobs, BlobStore
from streamrl.workers.sharing.host import HostShare, SharedBlob

log = structlog.get_logger(__name__)

# Read at once for a share. Those who wait for it see that it grows; without this, one that takes longer than their
# patience would be fetched by each of them.
_STRETCH_BYTES = 32 << 20
MIN_SHARED_BYTES = 64 << 10  # sharing a smaller blob costs more than fetching it


class Hosts(Protocol):
    """Other hosts that may have pieces (`swarm.Swarm`)."""

    def fill(self, shared: SharedBlob, store: BlobStore, counts: Counts) -> None:
        """Put every missing piece; what peers do not provide comes from the store."""


@dataclass(slots=True)
class Counts:
    """Bytes of blobs since the worker's start, by origin."""

    store: int = 0
    peers: int = 0
    host: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return self.store + self.peers + self.host

    def add(self, *, store: int = 0, peers: int = 0, host: int = 0) -> None:
        with self.lock:
            self.store += store
            self.peers += peers
            self.host += host


class Sharing:
    """One per worker."""

    def __init__(
        self,
        store: BlobStore,
        host: HostShare | None,
        hosts: Hosts | None = None,
        *,
        on_blob: Callable[[Counts], None] = lambda counts: None,  # called after each blob
        stretch_bytes: int = _STRETCH_BYTES,
    ) -> None:
        self.counts = Counts()
        self._stretch_bytes = stretch_bytes
        self._on_blob = on_blob
        self._store, self._host, self._hosts = store, host, hosts

    def reading(self, manifests: Sequence[Manifest]) -> Blobs:
        """Return the blobs of these manifests, for one attempt at reading them."""
        return _Reading(self, {shard.blob_name: shard for manifest in manifests for shard in manifest.shards})

    def make_room(self, num_bytes: int) -> None:
        """Free room for a mirror."""
        if self._host is not None:
            self._host.make_room(num_bytes)

    def get(self, record: ShardRecord) -> bytes:
        blob = self._get(record)
        self._on_blob(self.counts)
        return blob

    def _get(self, record: ShardRecord) -> bytes:
        if self._host is None or record.num_bytes < MIN_SHARED_BYTES or (self._hosts is None and self._host.is_alone()):
            return self.from_store(record)
        try:
            found = self._host.get(record, self._fill)
        except OSError as error:  # the folder was removed, or its file system failed
            log.warning("weights_not_shared", why=str(error))
            found = None
        if found is None:
            return self.from_store(record)
        blob, was_us = found
        if not was_us:
            self.counts.add(host=len(blob))
        return blob

    def from_store(self, record: ShardRecord) -> bytes:
        blob = self._store.get(record.blob_name)
        self.counts.add(store=len(blob))
        return blob

    def discard(self, record: ShardRecord) -> None:
        log.warning("shared_blob_wrong", blob=record.blob_name)
        if self._host is not None:
            self._host.discard(record)

    def _fill(self, shared: SharedBlob) -> None:
        if self._hosts is not None:
            self._hosts.fill(shared, self._store, self.counts)
            return
        record = shared.record
        for numbers in _stretches(shared.missing(), most=max(1, self._stretch_bytes // record.piece_bytes)):
            start, stop = record.piece(numbers[0]).start, record.piece(numbers[-1]).stop
            data = memoryview(self._store.part(record.blob_name, slice(start, stop)))
            if len(data) != stop - start:
                raise WeightsError(
                    f"blob {record.blob_name} ends at {start + len(data)}, before {record.num_bytes} bytes"
                )
            self.counts.add(store=len(data))
            for number in numbers:
                piece = record.piece(number)
                shared.put(number, data[piece.start - start : piece.stop - start])


def _stretches(numbers: Sequence[int], *, most: int) -> Iterator[Sequence[int]]:
    """Split rising numbers into runs without gaps, each of `most` at most."""
    begun = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1 or at - begun == most:
            yield numbers[begun:at]
            begun = at


class _Reading:
    def __init__(self, sharing: Sharing, records: Mapping[str, ShardRecord]) -> None:
        self._sharing, self._records = sharing, records
        self._seen: set[str] = set()

    def get(self, name: str) -> bytes:
        record = self._records[name]
        if name in self._seen:
            self._sharing.discard(record)
            return self._sharing.from_store(record)
        self._seen.add(name)
        return self._sharing.get(record)
