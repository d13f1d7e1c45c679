"""The learner's side: one rank encodes the ranges that it holds against what was last published.

The encoder keeps a host copy of the last *announced* state. `encode` only reads it; `advance`, called once the version
is announced, moves it on. So a publish that fails is simply encoded again from the same base, and what workers hold and
what deltas are made against cannot drift apart.

    encode_part, ... ─► join ─► put blob ─► gather records, announce ─► advance ─► now and then, encode_base: an anchor
       ▲                                        │                                                            beside it
       └────────── failed: again ◄──────────────┘

Nothing here waits. One thread at a time may use an encoder; encoding lets go of the interpreter's lock for most of its
time, so it can run beside a training step, and part by part beside the copy of what is encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import zstandard

from streamrl.errors import WeightsError
from streamrl.protocol.weights.delta import encode_sparse, scan
from streamrl.protocol.weights.format import (
    MAX_RANGE_ELEMENTS,
    Bits,
    Coding,
    HeldRange,
    RangeDigest,
    blob_name,
    digest_of,
    digests_of_pieces,
    piece_bytes_of,
)
from streamrl.protocol.weights.manifest import ShardRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShard:
    """One rank's share of a version, not yet stored anywhere."""

    blob: bytes
    ranges: tuple[RangeDigest, ...]

    def record(self, *, run_uid: str, version: int, rank: int) -> ShardRecord:
        """What the manifest says of this shard; `blob` is to be put under the record's `blob_name`."""
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
class CodedPart:
    """At most MAX_RANGE_ELEMENTS of a held range, coded."""

    said: RangeDigest
    payload: bytes | memoryview
    positions: npt.NDArray[np.int32] | None  # [n] what `advance` has to write over in the base; None: all of it
    bits: Bits  # [n] or [length], the new bits there


class ShardEncoder:
    """One per rank; keeps the host copy of what was last published."""

    def __init__(self) -> None:
        self._base: dict[tuple[str, int], Bits] = {}  # by tensor and start of each part
        self._pending: list[CodedPart] | None = None
        self._compressor = zstandard.ZstdCompressor(level=1)

    def encode(self, ranges: Sequence[HeldRange], *, anchor: bool) -> EncodedShard:
        """Encode the new state: all of it, or what differs from the base. Nothing is remembered until `advance`.

        From an anchor to the next a rank must hold the same ranges, else WeightsError: publish an anchor.
        """
        return self.join(self.encode_part(ranges, anchor=anchor), anchor=anchor)

    def encode_part(self, ranges: Sequence[HeldRange], *, anchor: bool) -> list[CodedPart]:
        """Some of the ranges, for `join`; the parts look at the caller's arrays until then."""
        pieces = _split(ranges)
        if anchor:
            return [_encode_whole(tensor, start, bits) for tensor, start, bits in pieces]
        return [self._encode_change(tensor, start, bits) for tensor, start, bits in pieces]

    def join(self, parts: Sequence[CodedPart], *, anchor: bool) -> EncodedShard:
        """All that this rank holds."""
        self._pending = None
        keys = {(part.said.tensor, part.said.start) for part in parts}
        assert len(keys) == len(parts), "a range comes twice"
        if not anchor and keys != self._base.keys():
            raise _no_base()
        shard = _joined(parts)
        self._pending = list(_detached(parts, shard.blob))
        return shard

    def advance(self) -> None:
        """The version is announced: what was encoded last is now the base."""
        assert self._pending is not None, "nothing was encoded since the base last moved"
        old, self._base = self._base, {}
        for part in self._pending:
            key = part.said.tensor, part.said.start
            if part.positions is None:
                self._base[key] = part.bits.copy()
            else:
                self._base[key] = old[key]
                self._base[key][part.positions] = part.bits
        self._pending = None

    def encode_base(self) -> EncodedShard:
        """All bits of the version announced last, to lie beside its delta as an anchor. The digests are made anew, so a
        base that is not what was announced shows in the manifest."""
        return _joined([_encode_whole(tensor, start, bits) for (tensor, start), bits in self._base.items()])

    def _encode_change(self, tensor: str, start: int, bits: Bits) -> CodedPart:
        old = self._base.get((tensor, start))
        if old is None or (len(old), old.dtype) != (len(bits), bits.dtype):
            raise _no_base()
        changes, digest = scan(bits, old)
        num_changed = len(changes.positions)
        coded = encode_sparse(changes.positions, changes.differences, self._compressor) if num_changed else b""
        if len(coded) >= bits.nbytes:
            return _raw(tensor, start, bits, num_changed=num_changed, digest=digest)
        coding = Coding.SPARSE if num_changed else Coding.SAME
        said = RangeDigest(tensor, start, len(bits), coding, num_changed, len(coded), digest)
        if 2 * num_changed > len(bits):
            return CodedPart(said=said, payload=coded, positions=None, bits=bits.copy())
        return CodedPart(said=said, payload=coded, positions=changes.positions, bits=changes.bits)


def _no_base() -> WeightsError:
    return WeightsError("this rank holds other ranges than when it last published: a delta has no base here")


def _joined(parts: Sequence[CodedPart]) -> EncodedShard:
    return EncodedShard(blob=b"".join(part.payload for part in parts), ranges=tuple(part.said for part in parts))


def _split(ranges: Sequence[HeldRange]) -> Iterator[tuple[str, int, Bits]]:
    """Tensor, start and bits of each part; what is empty is left out."""
    for held in ranges:
        assert held.bits.dtype in (np.dtype("<u2"), np.dtype("<u4")), f"{held.tensor}: bits must be uint16 or uint32"
        assert held.bits.ndim == 1, f"{held.tensor}: bits must be flat"
        assert held.bits.flags.c_contiguous, f"{held.tensor}: bits must be contiguous"
        for begin in range(0, len(held.bits), MAX_RANGE_ELEMENTS):
            yield held.tensor, held.start + begin, held.bits[begin : begin + MAX_RANGE_ELEMENTS]


def _encode_whole(tensor: str, start: int, bits: Bits) -> CodedPart:
    return _raw(tensor, start, bits, num_changed=len(bits), digest=digest_of(bits.data))


def _raw(tensor: str, start: int, bits: Bits, *, num_changed: int, digest: bytes) -> CodedPart:
    said = RangeDigest(tensor, start, len(bits), Coding.RAW, num_changed, bits.nbytes, digest)
    return CodedPart(said=said, payload=bits.data.cast("B"), positions=None, bits=bits)


def _detached(parts: Sequence[CodedPart], blob: bytes) -> Iterator[CodedPart]:
    """The parts with nothing left of the caller's arrays: those may change before `advance`, the blob does not."""
    begin = 0
    for part in parts:
        end = begin + part.said.num_bytes
        payload = memoryview(blob)[begin:end]
        raw = part.said.coding is Coding.RAW
        yield replace(part, payload=payload, bits=np.frombuffer(payload, dtype=part.bits.dtype) if raw else part.bits)
        begin = end
