"""The contents of one version, as data and as bytes. `format` specifies the layout.

A manifest that was encoded or decoded here is coherent, so no caller checks again: its ranges cover every element of
every tensor exactly once, their sizes agree with their codings and add up to their blobs, its base is older than
itself, and its canary is valid. The learner therefore notices a rank's missing record before it announces, and a worker
never patches outside a tensor.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import zstandard

from streamrl.errors import WeightsError, WireError
from streamrl.protocol.weights.adapters import Adapter, check_adapters, pack_adapters, read_adapters
from streamrl.protocol.weights.format import (
    BITS,
    DIGEST_BYTES,
    DTYPES,
    LEAST_PIECE_BYTES,
    MAGIC,
    MAX_MANIFEST_BYTES,
    MAX_RANGE_ELEMENTS,
    MAX_TENSOR_ELEMENTS,
    MOST_PIECE_BYTES,
    PIECE_DIGEST_BYTES,
    Coding,
    RangeRecord,
    TensorMeta,
    check_blob_name,
    digest_of,
)
from streamrl.protocol.wire.codec import Fields, pack, unpack
from streamrl.versions import show, term_of

_MAX_NAMES_CHARS = 16 << 20
_MAX_TENSORS = 1 << 20
_MAX_RANGES = 1 << 22
_MAX_CANARY_TOKENS = 1 << 16
# Columns of a shard's record: one number per range, in the order of `RangeRecord`.
_COLUMNS = {
    "tensors": "<u4",
    "starts": "<u8",
    "lengths": "<u4",
    "codings": "<u1",
    "num_changed": "<u4",
    "sizes": "<u4",
}


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


def encode_record(record: ShardRecord) -> bytes:
    """Encode one rank's record, for rank 0 to gather."""
    names = {name: index for index, name in enumerate(dict.fromkeys(one.tensor for one in record.ranges))}
    rows = [(names[tensor], *numbers) for tensor, *numbers, _ in record.ranges]
    return pack(
        {
            "blob_name": record.blob_name,
            "num_bytes": record.num_bytes,
            "digest": record.digest,
            "piece_bytes": record.piece_bytes,
            "pieces": record.pieces,
            "names": "\n".join(names),
            "num_ranges": len(record.ranges),
            **{
                name: np.array([row[place] for row in rows], dtype).tobytes()
                for place, (name, dtype) in enumerate(_COLUMNS.items())
            },
            "digests": b"".join(one.digest for one in record.ranges),
        }
    )


def decode_record(data: bytes) -> ShardRecord:
    """Decode a record; any malformed input raises WeightsError."""
    try:
        with unpack(data, max_bytes=MAX_MANIFEST_BYTES) as f:
            return _read_record(f)
    except WireError as error:
        raise WeightsError(f"a shard's record cannot be read: {error}") from None


def _read_record(f: Fields) -> ShardRecord:
    names = _names(f)
    count = f.integer("num_ranges", low=0, high=_MAX_RANGES)
    columns = {name: f.array(name, dtype, count=count) for name, dtype in _COLUMNS.items()}
    if count and (columns["tensors"].max() >= len(names) or columns["codings"].max() >= len(Coding)):
        raise WeightsError("a shard's record points beyond its names or names an unknown coding")
    digests = f.array("digests", f"V{DIGEST_BYTES}", count=count)
    rows = zip(*(column.tolist() for column in columns.values()), digests.tolist(), strict=True)
    return ShardRecord(
        blob_name=f.text("blob_name", max_chars=256),
        num_bytes=f.integer("num_bytes", low=0),
        digest=f.blob("digest"),
        piece_bytes=f.integer("piece_bytes", low=LEAST_PIECE_BYTES, high=MOST_PIECE_BYTES),
        pieces=f.blob("pieces"),
        ranges=tuple(
            RangeRecord(names[tensor], start, length, Coding(coding), *rest)
            for tensor, start, length, coding, *rest in rows
        ),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode for Redis; WeightsError if the shards do not cover the tensors (a rank's record is missing, say)."""
    check_coherent(manifest)
    dims = [size for tensor in manifest.tensors for size in tensor.shape]
    body = pack(
        {
            "version": manifest.version,
            "base": manifest.base,
            "step": manifest.step,
            "run_uid": manifest.run_uid,
            "names": "\n".join(tensor.name for tensor in manifest.tensors),
            "num_tensors": len(manifest.tensors),
            "dtypes": bytes(DTYPES.index(tensor.dtype) for tensor in manifest.tensors),
            "ranks": bytes(len(tensor.shape) for tensor in manifest.tensors),
            "num_dims": len(dims),
            "dims": np.array(dims, dtype="<u8").tobytes(),
            "shards": [encode_record(record) for record in manifest.shards],
            "anchor": [encode_record(record) for record in manifest.anchor],
            "num_canary_tokens": len(manifest.canary_ids),
            "canary_ids": np.array(manifest.canary_ids, dtype="<i4").tobytes(),
            **pack_adapters(manifest.adapters, {tensor.name: place for place, tensor in enumerate(manifest.tensors)}),
        }
    )
    frame = zstandard.ZstdCompressor(level=1).compress(body)
    return MAGIC + digest_of(frame) + frame


def decode_manifest(data: bytes) -> Manifest:
    """Decode a coherent manifest; any other input raises WeightsError."""
    head = len(MAGIC) + DIGEST_BYTES
    if data[: len(MAGIC)] != MAGIC:
        raise WeightsError("not a manifest of weights that this program can read")
    if digest_of(data[head:]) != data[len(MAGIC) : head]:
        raise WeightsError("a manifest does not agree with its digest")
    try:
        size = zstandard.frame_content_size(data[head:])
        if not 0 < size <= MAX_MANIFEST_BYTES:
            raise WeightsError(f"a manifest claims to expand to {size} bytes")
        body = zstandard.ZstdDecompressor().decompress(data[head:], max_output_size=size, allow_extra_data=False)
        with unpack(body, max_bytes=MAX_MANIFEST_BYTES) as f:
            manifest = _read_manifest(f)
    except (zstandard.ZstdError, WireError) as error:
        raise WeightsError(f"a manifest cannot be read: {error}") from None
    check_coherent(manifest)
    return manifest


def _read_manifest(f: Fields) -> Manifest:
    names = _names(f)
    count = f.integer("num_tensors", low=1, high=_MAX_TENSORS)
    dtypes = f.array("dtypes", "<u1", count=count)
    ranks = f.array("ranks", "<u1", count=count)
    dims = f.array("dims", "<u8", count=f.integer("num_dims", low=0, high=255 * count)).tolist()
    if len(names) != count or dtypes.max() >= len(DTYPES) or int(ranks.sum()) != len(dims):
        raise WeightsError("a manifest's list of tensors is inconsistent")
    ends = np.cumsum(ranks, dtype=np.int64).tolist()
    tensors = tuple(
        TensorMeta(name=name, dtype=DTYPES[dtype], shape=tuple(dims[end - rank : end]))
        for name, dtype, rank, end in zip(names, dtypes.tolist(), ranks.tolist(), ends, strict=True)
    )
    return Manifest(
        version=f.integer("version", low=1),
        base=f.integer("base", low=0),
        step=f.integer("step", low=0),
        run_uid=f.text("run_uid", max_chars=64),
        tensors=tensors,
        shards=_read_records(f, "shards"),
        anchor=_read_records(f, "anchor"),
        canary_ids=tuple(
            f.array("canary_ids", "<i4", count=f.integer("num_canary_tokens", low=0, high=_MAX_CANARY_TOKENS)).tolist()
        ),
        adapters=read_adapters(f, names),
    )


def _read_records(f: Fields, name: str) -> tuple[ShardRecord, ...]:
    return tuple(decode_record(record) for record in f.list(name, bytes))


def _names(f: Fields) -> list[str]:
    text = f.text("names", max_chars=_MAX_NAMES_CHARS)
    return text.split("\n") if text else []


_MAX_NAME_CHARS = 1024
_RESERVED_NAME = "__metadata__"  # has a special meaning in a safetensors header


def check_coherent(manifest: Manifest) -> None:
    """Raise WeightsError, with the reason, unless the manifest is coherent."""
    if not 0 <= manifest.base < manifest.version or term_of(manifest.version) < 1:
        raise WeightsError(f"version {manifest.version} cannot build on {manifest.base}")
    if manifest.anchor and not manifest.base:
        raise WeightsError(f"version {show(manifest.version)} is an anchor, and has another beside it")
    tensors = _check_tensors(manifest.tensors)
    check_adapters(manifest.adapters, tensors)
    digests = _check_shards(manifest, manifest.shards, tensors, anchor=manifest.base == 0)
    if manifest.anchor:
        whole = _check_shards(manifest, manifest.anchor, tensors, anchor=True)
        if any(digests.get(key, digest) != digest for key, digest in whole.items()):
            raise WeightsError(f"version {show(manifest.version)}: the delta and the anchor beside it disagree")
    if len(manifest.canary_ids) == 1 or min(manifest.canary_ids, default=0) < 0:
        raise WeightsError("a canary needs at least two tokens, none of them negative")


def _check_shards(
    manifest: Manifest, shards: tuple[ShardRecord, ...], tensors: Mapping[str, TensorMeta], *, anchor: bool
) -> dict[tuple[str, int, int], bytes]:
    """Check the shards; return the digest of each range's state by (tensor, start, length)."""
    by_tensor: dict[str, list[RangeRecord]] = defaultdict(list)
    merged = {adapter.tensor for adapter in manifest.adapters}
    for shard in shards:
        check_blob_name(shard.blob_name)
        if sum(record.num_bytes for record in shard.ranges) != shard.num_bytes or len(shard.digest) != DIGEST_BYTES:
            raise WeightsError(f"the ranges of blob {shard.blob_name} do not add up to it")
        if len(shard.pieces) != shard.num_pieces * PIECE_DIGEST_BYTES or shard.piece_bytes.bit_count() != 1:
            raise WeightsError(f"the pieces of blob {shard.blob_name} do not add up to it")
        for record in shard.ranges:
            if record.tensor not in tensors:
                raise WeightsError(f"a range of an unknown tensor: {record.tensor!r:.200}")
            _check_range(record, tensors[record.tensor], anchor=anchor)
            if record.coding is not Coding.MERGED:
                by_tensor[record.tensor].append(record)
            elif record.tensor not in merged or record.start + record.length > tensors[record.tensor].num_elements:
                raise WeightsError(f"the range of {record.tensor} at {record.start} is not merged with anything")
    for tensor in manifest.tensors:
        _check_cover(tensor, by_tensor[tensor.name], version=manifest.version)
    return {(r.tensor, r.start, r.length): r.digest for records in by_tensor.values() for r in records}


def _check_tensors(tensors: tuple[TensorMeta, ...]) -> Mapping[str, TensorMeta]:
    by_name = {tensor.name: tensor for tensor in tensors}
    if not tensors or len(by_name) != len(tensors):
        raise WeightsError("a manifest must name its tensors, each once")
    for tensor in tensors:
        if not (tensor.name.isprintable() and 0 < len(tensor.name) <= _MAX_NAME_CHARS) or tensor.name == _RESERVED_NAME:
            raise WeightsError(f"not the name of a tensor: {tensor.name!r:.200}")
        if tensor.dtype not in BITS or any(size < 0 for size in tensor.shape) or len(tensor.shape) > 255:
            raise WeightsError(f"tensor {tensor.name} has an impossible dtype or shape")
        if tensor.num_elements > MAX_TENSOR_ELEMENTS:
            raise WeightsError(f"tensor {tensor.name} has {tensor.num_elements} elements, too many to be true")
    return by_name


def _check_range(record: RangeRecord, tensor: TensorMeta, *, anchor: bool) -> None:
    raw_bytes = record.length * BITS[tensor.dtype].itemsize
    match record.coding:
        case Coding.SAME:
            fits = not anchor and record.num_changed == record.num_bytes == 0
        case Coding.RAW:
            fits = record.num_bytes == raw_bytes
        case Coding.SPARSE:
            fits = not anchor and record.num_changed >= 1 and 0 < record.num_bytes < raw_bytes
        case Coding.PRETRAINED | Coding.MERGED:
            fits = record.num_changed == record.num_bytes == 0
    fits = fits and 0 < record.length <= MAX_RANGE_ELEMENTS and 0 <= record.num_changed <= record.length
    if not fits or len(record.digest) != DIGEST_BYTES:
        raise WeightsError(
            f"the range of {tensor.name} at {record.start} has a coding that its kind of version does not allow"
        )


def _check_cover(tensor: TensorMeta, records: list[RangeRecord], *, version: int) -> None:
    reached = 0
    for record in sorted(records, key=lambda one: one.start):
        if record.start != reached:
            word = "missing" if record.start > reached else "given twice"
            where = min(record.start, reached)
            raise WeightsError(f"version {show(version)}: elements of {tensor.name} from {where} are {word}")
        reached += record.length
    if reached != tensor.num_elements:
        raise WeightsError(
            f"version {show(version)}: {reached} elements of {tensor.name} are published, it has {tensor.num_elements}"
        )
