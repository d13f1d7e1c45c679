"""What must hold within a manifest before anybody acts on it.

Its ranges cover every element of every tensor exactly once, their sizes agree with their codings and add up to their
blobs, its base is older than itself, and its canary is one. So a rank's forgotten record is found by the learner before
it announces, and a worker never patches beside a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from streamrl.errors import WeightsError
from streamrl.versions import epoch_of, show
from streamrl.weights.format import (
    BITS,
    DIGEST_BYTES,
    MAX_RANGE_ELEMENTS,
    MAX_TENSOR_ELEMENTS,
    Coding,
    RangeDigest,
    TensorMeta,
    check_blob_name,
)

if TYPE_CHECKING:
    from streamrl.weights.manifest import Manifest, ShardRecord

_MAX_NAME_CHARS = 1024
_RESERVED_NAME = "__metadata__"  # means something else in a safetensors header


def check_coherent(manifest: Manifest) -> None:
    """Nothing, or one WeightsError that says what is wrong."""
    if not 0 <= manifest.base < manifest.version or epoch_of(manifest.version) < 1:
        raise WeightsError(f"version {manifest.version} cannot build on {manifest.base}")
    if manifest.anchor and not manifest.base:
        raise WeightsError(f"version {show(manifest.version)} is an anchor, and has another beside it")
    tensors = _check_tensors(manifest.tensors)
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
    """The digest of the state of each range (tensor, start, length)."""
    by_tensor: dict[str, list[RangeDigest]] = defaultdict(list)
    for shard in shards:
        check_blob_name(shard.blob_name)
        if sum(part.num_bytes for part in shard.ranges) != shard.num_bytes or len(shard.digest) != DIGEST_BYTES:
            raise WeightsError(f"the ranges of blob {shard.blob_name} do not add up to it")
        for part in shard.ranges:
            if part.tensor not in tensors:
                raise WeightsError(f"a range of an unknown tensor: {part.tensor!r:.200}")
            _check_range(part, tensors[part.tensor], anchor=anchor)
            by_tensor[part.tensor].append(part)
    for tensor in manifest.tensors:
        _check_cover(tensor, by_tensor[tensor.name], version=manifest.version)
    return {(r.tensor, r.start, r.length): r.digest for parts in by_tensor.values() for r in parts}


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


def _check_range(part: RangeDigest, tensor: TensorMeta, *, anchor: bool) -> None:
    raw_bytes = part.length * BITS[tensor.dtype].itemsize
    match part.coding:
        case Coding.SAME:
            fits = not anchor and part.num_changed == part.num_bytes == 0
        case Coding.RAW:
            fits = part.num_bytes == raw_bytes
        case Coding.SPARSE:
            fits = not anchor and part.num_changed >= 1 and 0 < part.num_bytes < raw_bytes
    fits = fits and 0 < part.length <= MAX_RANGE_ELEMENTS and 0 <= part.num_changed <= part.length
    if not fits or len(part.digest) != DIGEST_BYTES:
        raise WeightsError(f"the range of {tensor.name} at {part.start} is not coded as its kind of version asks for")


def _check_cover(tensor: TensorMeta, parts: list[RangeDigest], *, version: int) -> None:
    reached = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start != reached:
            word = "missing" if part.start > reached else "given twice"
            where = min(part.start, reached)
            raise WeightsError(f"version {show(version)}: elements of {tensor.name} from {where} are {word}")
        reached += part.length
    if reached != tensor.num_elements:
        raise WeightsError(
            f"version {show(version)}: {reached} elements of {tensor.name} are published, it has {tensor.num_elements}"
        )
