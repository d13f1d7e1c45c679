"""The contents of one version, as data; `manifest_bytes` has their bytes, and `coherence` what must hold of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from streamrl.protocol.weights.adapters import Adapter
from streamrl.protocol.weights.format import LEAST_PIECE_BYTES, PIECE_DIGEST_BYTES, RangeRecord, TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One blob: what one rank published of the version."""

    blob_name: str
    num_bytes: int
    digest: bytes  # of the whole blob
    ranges: tuple[RangeRecord, ...]  # in the order of their codings in the blob
    piece_bytes: int = LEAST_PIECE_BYTES  # of all pieces but the last
    pieces: bytes = b""  # the SHA-256 of each, in order

    @property
    def num_pieces(self) -> int:
        return -(-self.num_bytes // self.piece_bytes)

    def piece(self, number: int) -> slice:
        """The piece's slice of the blob."""
        return slice(number * self.piece_bytes, min((number + 1) * self.piece_bytes, self.num_bytes))

    def is_piece(self, number: int, data: bytes | bytearray | memoryview) -> bool:
        begin = number * PIECE_DIGEST_BYTES
        return hashlib.sha256(data).digest() == self.pieces[begin : begin + PIECE_DIGEST_BYTES]

    def placed_ranges(self) -> Iterator[tuple[RangeRecord, slice]]:
        """Yield each range with its slice of the blob."""
        begin = 0
        for record in self.ranges:
            yield record, slice(begin, begin + record.num_bytes)
            begin += record.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    version: int
    base: int  # the version that a delta changes; 0: an anchor
    step: int  # the optimizer step that made it
    run_uid: str
    tensors: tuple[TensorMeta, ...]
    shards: tuple[ShardRecord, ...]
    anchor: tuple[ShardRecord, ...] = ()  # of a delta: all bits of the same state, for readers far behind
    canary_ids: tuple[int, ...] = ()  # [T] token IDs with which workers test their engine
    adapters: tuple[Adapter, ...] = ()  # workers serve the model with these merged

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def blob_names(self) -> frozenset[str]:
        return frozenset(shard.blob_name for shard in (*self.shards, *self.anchor))

    @property
    def served(self) -> tuple[TensorMeta, ...]:
        """The model's own tensors, without the adapters' factors."""
        factors = {name for adapter in self.adapters for name in (adapter.a, adapter.b)}
        return tuple(tensor for tensor in self.tensors if tensor.name not in factors)

    def as_anchor(self) -> Manifest | None:
        """Return the same version without a base; None if it has no anchor."""
        if self.base == 0:
            return self
        return replace(self, base=0, shards=self.anchor, anchor=()) if self.anchor else None
