"""A manifest's bytes, for Redis. `format` specifies the layout.

A manifest that was encoded or decoded here is coherent (`coherence`), so no caller checks again.
"""

from __future__ import annotations

import numpy as np
import zstandard

from streamrl.errors import WeightsError, WireError
from streamrl.protocol.weights.adapters import pack_adapters, read_adapters
from streamrl.protocol.weights.coherence import check_coherent
from streamrl.protocol.weights.format import (
    DIGEST_BYTES,
    DTYPES,
    LEAST_PIECE_BYTES,
    MAGIC,
    MAX_MANIFEST_BYTES,
    MOST_PIECE_BYTES,
    Coding,
    RangeRecord,
    TensorMeta,
    digest_of,
)
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.wire.codec import Fields, pack, unpack

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
