"""One version on its way out, beside the loop: on every rank, in the publisher's thread.

    copy ─ encode against the base ─ room in the store ─ put blobs ─┐ every rank, its own runs only
                                                                    ▼
                          gather records ─ manifest ─ announce        rank 0, one fenced script
                                                │
           advance the base  ◄── all ranks ok ──┴── else: keep the base

The collectives here go through a group of their own, so that they never meet those of the loop. Blocks on the store, on
Redis and on the other ranks' threads, each within its own bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from learner.distributed import World
from learner.publishing.sweep import Sweeper
from streamrl.errors import Fenced, StreamrlError
from streamrl.transport.types import Announcement
from streamrl.versions import show
from streamrl.weights.encoder import EncodedShard, ShardEncoder, encode_whole
from streamrl.weights.format import HeldRange, TensorMeta
from streamrl.weights.manifest import Canary, Manifest, ShardRecord, decode_record, encode_manifest, encode_record
from streamrl.weights.stores import BlobStore

log = structlog.get_logger(__name__)


class Announcer(Protocol):
    """What publishing needs of rank 0's stream."""

    def announce(self, announcement: Announcement, *, keep: list[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cargo:
    """A state that is to become a version."""

    version: int
    step: int
    base: int  # 0: an anchor by itself
    beside: bool  # an anchor beside the delta
    ranges: Sequence[HeldRange]  # this rank's

    @property
    def num_shards(self) -> int:
        """Of each rank."""
        return 2 if self.beside else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """What all ranks know of an announced version."""

    cargo: Cargo
    num_bytes: int  # of the delta, or of the anchor by itself
    anchor_bytes: int | None  # None: there is no anchor
    changed_fraction: float


class Shipper:
    def __init__(
        self,
        *,
        world: World,  # with a group that nobody else uses
        run_uid: str,
        tensors: tuple[TensorMeta, ...],
        store: BlobStore,
        announcer: Announcer | None,  # rank 0 has one
        sweeper: Sweeper | None,  # rank 0 has one
    ) -> None:
        assert (announcer is None) == (sweeper is None)
        self._world, self._run_uid, self._tensors = world, run_uid, tensors
        self._store, self._announcer, self._sweeper = store, announcer, sweeper
        self._encoder = ShardEncoder()

    def encode(self, cargo: Cargo) -> list[EncodedShard]:
        """This rank's part; empty when that did not work."""
        try:
            shards = [self._encoder.encode(cargo.ranges, anchor=cargo.base == 0)]
            return [*shards, encode_whole(cargo.ranges)] if cargo.beside else shards
        except StreamrlError as error:
            log.warning("weights not encoded", version=show(cargo.version), error=str(error))
            return []

    def ship(self, cargo: Cargo, shards: Sequence[EncodedShard], canary: Canary) -> Shipped | None:
        """What was encoded last. A collective; None when it failed somewhere, which all ranks then know."""
        mine = self._stored(cargo, shards)
        packed = [encode_record(record) for record in mine] or [b""] * cargo.num_shards
        gathered = [self._world.gather_bytes(record) for record in packed]
        announced, refusal = False, None
        if all(record for records in gathered for record in records):
            announced, refusal = self._announced(cargo, canary, gathered)
        agreed = self._world.all_agree(announced)  # the others must hear of a refusal, and not wait for ever
        if refusal is not None:
            raise refusal
        if not agreed:
            return None
        self._encoder.advance()
        return _shipped(cargo, gathered)

    def _stored(self, cargo: Cargo, shards: Sequence[EncodedShard]) -> list[ShardRecord]:
        """This rank's records of blobs that are in the store; empty when that did not work this time."""
        if not self._found_room(shards):
            return []
        records = [
            shard.record(run_uid=self._run_uid, version=cargo.version, rank=self._world.rank) for shard in shards
        ]
        try:
            for record, shard in zip(records, shards, strict=True):
                self._store.put(record.blob_name, shard.blob)
        except StreamrlError as error:
            log.warning("weights not stored", version=show(cargo.version), error=str(error))
            return []
        return records

    def _found_room(self, shards: Sequence[EncodedShard]) -> bool:
        """Rank 0 makes room for the blobs of all; False also when a rank has none."""
        num_bytes = self._world.total(np.array([sum(len(shard.blob) for shard in shards)], dtype=np.float64))
        room = self._sweeper is None or self._sweeper.make_room(int(num_bytes[0]))
        return self._world.all_agree(room and bool(shards))

    def _announced(
        self, cargo: Cargo, canary: Canary, gathered: Sequence[Sequence[bytes]]
    ) -> tuple[bool, Fenced | None]:
        """Rank 0 tells the workers; elsewhere there is nothing that could fail."""
        if self._announcer is None or self._sweeper is None:
            return True, None
        shards, *anchor = [tuple(decode_record(record) for record in records) for records in gathered]
        manifest = Manifest(
            version=cargo.version,
            base=cargo.base,
            step=cargo.step,
            run_uid=self._run_uid,
            tensors=self._tensors,
            shards=shards,
            anchor=anchor[0] if anchor else (),
            canary=canary,
        )
        keep = sorted(self._sweeper.kept_with(manifest))
        try:
            announcement = Announcement(
                version=cargo.version, base=cargo.base, step=cargo.step, manifest=encode_manifest(manifest)
            )
            self._announcer.announce(announcement, keep=keep)
        except Fenced as error:
            return False, error
        except StreamrlError as error:
            log.warning("weights not announced", version=show(cargo.version), error=str(error))
            return False, None
        self._sweeper.announced(manifest)
        return True, None


def _shipped(cargo: Cargo, gathered: Sequence[Sequence[bytes]]) -> Shipped:
    shards, *anchor = [[decode_record(record) for record in records] for records in gathered]
    ranges = [part for shard in shards for part in shard.ranges]
    num_bytes = sum(shard.num_bytes for shard in shards)
    anchor_bytes = num_bytes if cargo.base == 0 else None
    return Shipped(
        cargo=cargo,
        num_bytes=num_bytes,
        anchor_bytes=sum(shard.num_bytes for shard in anchor[0]) if anchor else anchor_bytes,
        changed_fraction=sum(part.num_changed for part in ranges) / max(1, sum(part.length for part in ranges)),
    )
