"""What must hold of a manifest, whoever made it.

Its ranges cover every element of every tensor exactly once, their sizes agree with their codings and add up to their
blobs, its base is older than itself, and its canary is valid. The learner therefore notices a rank's missing record
before it announces, and a worker never patches outside a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from streamrl.errors import WeightsError
from streamrl.protocol.weights.adapters import check_adapters
from streamrl.protocol.weights.format import (
    BITS,
    DIGEST_BYTES,
    MAX_RANGE_ELEMENTS,
    MAX_TENSOR_ELEMENTS,
    PIECE_DIGEST_BYTES,
    Coding,
    RangeRecord,
    TensorMeta,
    check_blob_name,
)
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.versions import show, term_of

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
