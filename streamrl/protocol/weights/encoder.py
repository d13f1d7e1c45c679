"""The learner's side: one rank encodes the ranges it holds against the version last published.

The encoder's base is the last *announced* state, in the arrays that the caller passed. `encode` only reads it;
`advance`, called once the version is announced, switches to that version's arrays. Nothing is copied, so the caller
must not write to them until the next version is announced. A publish that fails is encoded again from the same base, so
the workers' state and the base of deltas cannot drift apart.

    encode_ranges, ... ─► join ─► put blob ─► gather records, announce ─► advance ─► now and then, an anchor beside it:
       ▲                                        │                                                           encode_base
       └────────── failed: again ◄──────────────┘

Blocks on nothing. One thread at a time may use an encoder. Encoding releases the GIL most of the time, so it can run
beside a training step, and part by part beside the copy of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from streamrl.errors import WeightsError
from streamrl.protocol.weights.format import (
    MAX_RANGE_ELEMENTS,
    Bits,
    Coding,
    HeldRange,
    RangeRecord,
    blob_name,
    digest_of,
    digests_of_pieces,
    piece_bytes_of,
)
from streamrl.protocol.weights.manifest import ShardRecord
from streamrl.protocol.weights.sparse import Codecs


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShard:
    """One rank's share of a version, not yet stored anywhere."""

    blob: bytes
    ranges: tuple[RangeRecord, ...]

    def record(self, *, run_uid: str, version: int, rank: int) -> ShardRecord:
        """Return this shard's entry in the manifest; store `blob` under the record's `blob_name`."""
        digest, piece_bytes = digest_of(self.blob), piece_bytes_of(len(self.blob))
        return ShardRecord(
            blob_name=blob_name(run_uid=run_uid, version=version, rank=rank, digest=digest),
            num_bytes=len(self.blob),
            digest=digest,
            ranges=self.ranges,
            piece_bytes=piece_bytes,
            pieces=digests_of_pieces(self.blob, piece_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRange:
    """At most MAX_RANGE_ELEMENTS of a held range, coded."""

    record: RangeRecord
    payload: bytes | memoryview
    bits: Bits  # [length] the caller's array


class ShardEncoder:
    """The encoder of one rank."""

    def __init__(self) -> None:
        self._base: dict[tuple[str, int], Bits] = {}  # by tensor and start of each range
        self._pending: dict[tuple[str, int], Bits] | None = None
        self._codecs = Codecs()
        self._compressor = zstandard.ZstdCompressor(level=1)

    def encode(self, ranges: Sequence[HeldRange], *, anchor: bool) -> EncodedShard:
        """Encode the new state: all of it (an anchor), or what differs from the base. `advance` makes it the base.

        From one anchor to the next a rank must hold the same ranges, else WeightsError: publish an anchor.
        """
        return self.join(self.encode_ranges(ranges, anchor=anchor), anchor=anchor)

    def encode_ranges(self, ranges: Sequence[HeldRange], *, anchor: bool) -> list[EncodedRange]:
        """Encode some of the ranges, for `join`."""
        pieces = _split(ranges)
        if anchor:
            return [_encode_whole(tensor, start, bits) for tensor, start, bits in pieces]
        return [self._encode_change(tensor, start, bits) for tensor, start, bits in pieces]

    def join(self, encoded: Sequence[EncodedRange], *, anchor: bool) -> EncodedShard:
        """Join the encodings of all ranges that this rank holds."""
        self._pending = None
        pending = {(one.record.tensor, one.record.start): one.bits for one in encoded}
        assert len(pending) == len(encoded), "a range comes twice"
        if not anchor and pending.keys() != self._base.keys():
            raise _no_base()
        shard = _joined(encoded)
        self._pending = pending
        return shard

    def advance(self) -> None:
        """Make the last encoded state the base, once its version is announced."""
        assert self._pending is not None, "nothing was encoded since the base last moved"
        self._base, self._pending = self._pending, None
        self._codecs.expect(sum(bits.nbytes for bits in self._base.values()))

    def encode_base(self) -> EncodedShard:
        """Encode all bits of the version announced last, as an anchor beside its delta.

        The digests are computed again, so a base that is not what was announced shows in the manifest.
        """
        return _joined([_encode_whole(tensor, start, bits) for (tensor, start), bits in self._base.items()])

    def _encode_change(self, tensor: str, start: int, bits: Bits) -> EncodedRange:
        old = self._base.get((tensor, start))
        if old is None or (len(old), old.dtype) != (len(bits), bits.dtype):
            raise _no_base()
        found = self._codecs.get().changes(bits, old)
        coded = self._compressor.compress(found.plain.data) if found.num_changed else b""
        if len(coded) >= bits.nbytes:
            return _raw(tensor, start, bits, num_changed=found.num_changed, digest=found.digest)
        coding = Coding.SPARSE if found.num_changed else Coding.SAME
        record = RangeRecord(tensor, start, len(bits), coding, found.num_changed, len(coded), found.digest)
        return EncodedRange(record=record, payload=coded, bits=bits)


def _no_base() -> WeightsError:
    return WeightsError("this rank holds other ranges than when it last published: a delta has no base here")


def _joined(encoded: Sequence[EncodedRange]) -> EncodedShard:
    return EncodedShard(blob=b"".join(one.payload for one in encoded), ranges=tuple(one.record for one in encoded))


def _split(ranges: Sequence[HeldRange]) -> Iterator[tuple[str, int, Bits]]:
    """Yield tensor, start and bits of each range; skip empty ranges."""
    for held in ranges:
        assert held.bits.dtype in (np.dtype("<u2"), np.dtype("<u4")), f"{held.tensor}: bits must be uint16 or uint32"
        assert held.bits.ndim == 1, f"{held.tensor}: bits must be flat"
        assert held.bits.flags.c_contiguous, f"{held.tensor}: bits must be contiguous"
        for begin in range(0, len(held.bits), MAX_RANGE_ELEMENTS):
            yield held.tensor, held.start + begin, held.bits[begin : begin + MAX_RANGE_ELEMENTS]


def _encode_whole(tensor: str, start: int, bits: Bits) -> EncodedRange:
    return _raw(tensor, start, bits, num_changed=len(bits), digest=digest_of(bits.data))


def _raw(tensor: str, start: int, bits: Bits, *, num_changed: int, digest: bytes) -> EncodedRange:
    record = RangeRecord(tensor, start, len(bits), Coding.RAW, num_changed, bits.nbytes, digest)
    return EncodedRange(record=record, payload=bits.data.cast("B"), bits=bits)
