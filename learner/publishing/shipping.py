"""Ships one version beside the loop: on every rank, in the publisher's thread.

    copy ─ encode against the base ─ room in the store ─ put blobs ─┐ every rank, its own runs only
                                                                    ▼
                          gather records ─ manifest ─ announce        rank 0, one fenced script
                                                │
           advance the base  ◄── all ranks ok ──┴── else: keep the base
                  │
    now and then ─┴► the whole base ─ room ─ put blobs ─ gather ─ the same manifest with an anchor ─ one fenced script

Only a cast of this step's masters is announced: the digests of the encoded ranges must equal those of a separate cast
(`host_copy.cast_digests`).

Workers load the delta while its anchor is still being stored. A worker that joins meanwhile, or after a crash in
between, starts from the previous anchor, which is kept until there are two newer ones.

The collectives here use a process group of their own, so that they never mix with the loop's. Blocks on the store, on
Redis and on the other ranks' threads, each within its own timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import structlog

from streamrl.errors import Fenced, StreamrlError
from streamrl.learner.process.ranks import World
from streamrl.learner.publishing.host_copy import CastDigests, refuse_other_bytes
from streamrl.learner.publishing.sweep import Sweeper
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.encoder import EncodedRange, EncodedShard, ShardEncoder
from streamrl.protocol.weights.format import Coding, HeldRange, RangeRecord
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.manifest_bytes import decode_record, encode_manifest, encode_record
from streamrl.protocol.weights.stores import BlobStore
from streamrl.versions import show

log = structlog.get_logger(__name__)


class Announcer(Protocol):
    """The part of rank 0's stream that publishing uses."""

    def announce(self, announcement: Announcement, *, keep: list[int]) -> None: ...

    def amend(self, announcement: Announcement, *, keep: list[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What all ranks know about an announced version."""

    version: int
    step: int
    base: int = 0  # 0: an anchor without a delta
    num_bytes: int  # of the delta, or of the anchor without one
    changed_fraction: float

    @property
    def needs(self) -> tuple[int, ...]:
        """The versions whose manifests a worker needs to reach this one."""
        return (self.version, self.base) if self.base else (self.version,)


class Shipper:
    def __init__(
        self,
        *,
        world: World,  # with a process group of its own
        store: BlobStore,
        sweeper: Sweeper,  # only rank 0's is used, as with the announcer
        announcer: Announcer,
    ) -> None:
        self._world, self._store, self._sweeper, self._announcer = world, store, sweeper, announcer
        self._encoder = ShardEncoder()
        self._announced: Manifest | None = None  # the newest
        self._byteless: Sequence[RangeRecord] = ()  # ranges without bytes of the version shipped last

    def encode(self, pending: Manifest, ranges: Sequence[HeldRange]) -> list[EncodedRange]:
        """Encode some of this rank's ranges. Here and below `pending` is the manifest without its blobs."""
        return self._encoder.encode_ranges(ranges, anchor=pending.base == 0)

    def ship(
        self,
        pending: Manifest,
        encoded: Sequence[Future[list[EncodedRange]]],
        cast: CastDigests | None,  # None: the parts were verified before they were encoded
        byteless: Sequence[RangeRecord] = (),
    ) -> Published | None:
        """Store and announce a version, with `byteless`, ranges that have no bytes. A collective.

        None if it failed on any rank, which all ranks then know.
        """
        self._byteless = byteless
        records = self._gathered(pending, self._joined(pending, encoded, cast))
        if records is None:
            return None
        manifest = replace(pending, shards=records)
        if not self._announce_together(manifest):
            return None
        self._encoder.advance()
        self._announced = manifest
        return Published(
            version=manifest.version,
            step=manifest.step,
            base=manifest.base,
            num_bytes=manifest.num_bytes,
            changed_fraction=_changed_fraction(records),
        )

    def store_anchor(self) -> int | None:
        """Store an anchor beside the version announced last. A collective.

        Returns the anchor's bytes; None if it failed on any rank: a later version then gets one.
        """
        assert self._announced is not None, "an anchor belongs to an announced version"
        records = self._gathered(self._announced, self._with_byteless(self._encoder.encode_base()))
        if records is None:
            return None
        manifest = replace(self._announced, anchor=records)
        return sum(record.num_bytes for record in records) if self._announce_together(manifest, amended=True) else None

    def _joined(
        self, pending: Manifest, encoded: Sequence[Future[list[EncodedRange]]], cast: CastDigests | None
    ) -> EncodedShard | None:
        """Join this rank's parts; None on an error."""
        try:
            parts = [part for some in encoded for part in some.result()]
            shard = self._encoder.join(parts, anchor=pending.base == 0)
            if cast is not None:
                refuse_other_bytes(shard.ranges, cast)
            return self._with_byteless(shard)
        except StreamrlError as error:
            log.warning("weights not encoded", version=show(pending.version), error=str(error))
            return None

    def _with_byteless(self, shard: EncodedShard) -> EncodedShard:
        return replace(shard, ranges=(*shard.ranges, *self._byteless))

    def _gathered(self, manifest: Manifest, shard: EncodedShard | None) -> tuple[ShardRecord, ...] | None:
        """Gather all ranks' records of stored blobs; None if any rank failed."""
        own = self._stored(manifest, shard)
        packed = self._world.gather_bytes(b"" if own is None else encode_record(own))
        return tuple(decode_record(record) for record in packed) if all(packed) else None

    def _stored(self, manifest: Manifest, shard: EncodedShard | None) -> ShardRecord | None:
        """Store this rank's blob and return its record; None on an error."""
        if not self._make_room(shard) or shard is None:
            return None
        record = shard.record(run_uid=manifest.run_uid, version=manifest.version, rank=self._world.rank)
        try:
            self._store.put(record.blob_name, shard.blob)
        except StreamrlError as error:
            log.warning("weights not stored", version=show(manifest.version), error=str(error))
            return None
        return record

    def _make_room(self, shard: EncodedShard | None) -> bool:
        """Make room on rank 0 for the blobs of all; False also if a rank has none."""
        num_bytes = self._world.total(np.array([0 if shard is None else len(shard.blob)], dtype=np.float64))
        has_room = not self._world.is_main or self._sweeper.make_room(int(num_bytes[0]))
        return self._world.all_agree(has_room and shard is not None)

    def _announce_together(self, manifest: Manifest, *, amended: bool = False) -> bool:
        """Announce on rank 0; the other ranks must learn of a refusal instead of waiting for ever."""
        refusal: StreamrlError | None = None
        if self._world.is_main:
            try:
                self._announce(manifest, amended=amended)
            except StreamrlError as error:
                refusal = error
        agreed = self._world.all_agree(refusal is None)
        if isinstance(refusal, Fenced):
            raise refusal
        if refusal is not None:
            what = "anchor not announced" if amended else "weights not announced"
            log.warning(what, version=show(manifest.version), error=str(refusal))
        return agreed

    def _announce(self, manifest: Manifest, *, amended: bool) -> None:
        send = self._announcer.amend if amended else self._announcer.announce
        encoded = encode_manifest(manifest)
        announcement = Announcement(version=manifest.version, base=manifest.base, step=manifest.step, manifest=encoded)
        send(announcement, keep=sorted(self._sweeper.kept_with(manifest)))
        self._sweeper.announced(manifest)


def _changed_fraction(records: Sequence[ShardRecord]) -> float:
    without_bytes = (Coding.PRETRAINED, Coding.MERGED)
    ranges = [part for record in records for part in record.ranges if part.coding not in without_bytes]
    return sum(part.num_changed for part in ranges) / max(1, sum(part.length for part in ranges))
