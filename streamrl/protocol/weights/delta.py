"""One range against its base: find what changed, code it, patch it back in. The specification is in `format`.

Nothing here waits. The work is bound by memory: the new state and the base are each read once from memory, in pieces
that stay in the cache, and compared and digested while they are there.

Tensors are patched by stretches, each with all of its deltas at once, side by side:

    columns ─► thread: decode a column's deltas together ─► add them where they belong ─► next column
              thread: ...

Columns share no element, so threads need not know of each other. One delta is patched by one thread, because a worker
generates meanwhile; who is far behind generates nothing of use, and takes the cores that there are.

So memory is read once, and not once for each of many deltas:

    delta 6.51   | a  | b  | c  |          column 1: a of 6.51, a of 6.52, ...      fits the cache
    delta 6.52   | a  | b  | c  |    ─►    column 2: b of 6.51, b of 6.52, ...
    ...

Deltas may be cut differently (another number of ranks made them): a column ends where all of them have a cut.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from streamrl.errors import WeightsError
from streamrl.protocol.weights.changes import ChangeLog, Positions
from streamrl.protocol.weights.format import Bits, Coding, RangeDigest
from streamrl.protocol.weights.manifest import Manifest

T = TypeVar("T")
Places = npt.NDArray[np.int32]  # [n] strictly increasing; enough within a range, and kept until the base advances

_CHUNK = 1 << 19  # elements compared at a time: 1 MB of bf16 on each side
_WIDE = 0xFFFF
_GROUP = 8  # flags in a machine word
_DENSE = 0.5  # above this share of touched groups, looking at every flag is faster
_MOST_THREADS = 4  # the memory is busy with so many
_AT_ONCE = 1 << 16  # changed elements: what is decoded of them stays in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Where a range differs from its base."""

    positions: Places  # [n] from the range's start
    bits: Bits  # [n] the new ones there
    differences: Bits  # [n] of the bit patterns: new - old, modulo their width


def scan(new: Bits, old: Bits) -> tuple[Changes, bytes]:
    """What differs, and the digest of `new`. Less than 2^31 elements."""
    state = xxhash.xxh3_128()
    differs = np.zeros(min(_CHUNK, len(new) + _GROUP), dtype=np.bool_)
    found: list[tuple[Places, Bits, Bits]] = []
    for begin in range(0, len(new), _CHUNK):
        piece, base = new[begin : begin + _CHUNK], old[begin : begin + _CHUNK]
        state.update(piece.data)
        np.not_equal(piece, base, out=differs[: len(piece)])
        padded = -(-len(piece) // _GROUP) * _GROUP
        differs[len(piece) : padded] = False
        where = _nonzero(differs[:padded])
        if len(where):  # values are read while they are in the cache
            bits = piece[where]
            found.append(((where + begin).astype(np.int32), bits, bits - base[where]))
    none = np.empty(0, dtype=np.int32), new[:0], new[:0]
    positions, changed, differences = (np.concatenate(parts) for parts in zip(none, *found, strict=True))
    return Changes(positions=positions, bits=changed, differences=differences), state.digest()


def _nonzero(flags: npt.NDArray[np.bool_]) -> Positions:
    """np.flatnonzero, about twice as fast where few are set: eight flags are first looked at as one integer."""
    groups = flags.view(np.uint64)
    touched = np.flatnonzero(groups != 0)
    if len(touched) > _DENSE * len(groups):
        return np.flatnonzero(flags)
    lanes = np.flatnonzero(groups[touched].view(np.bool_))
    positions: Positions = (touched[lanes >> 3] << 3) | (lanes & 7)
    return positions


def encode_sparse(positions: Places, differences: Bits, compressor: zstandard.ZstdCompressor) -> bytes:
    """At least one position, and the difference of the bit patterns there."""
    num_changed = len(positions)
    gaps = np.empty(num_changed, dtype=np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= np.uint32(1)
    wide = gaps[:0]
    if gaps.max() >= _WIDE:
        wide = gaps[gaps >= _WIDE]
        gaps = np.minimum(gaps, np.uint32(_WIDE))
    width = 2 + differences.itemsize
    plain = np.empty(num_changed * width + wide.nbytes, dtype=np.uint8)
    planes = plain[: num_changed * width].reshape(width, num_changed)
    _split_planes(gaps, planes[:2])
    _split_planes(_zigzag(differences), planes[2:])
    plain[num_changed * width :] = wide.view(np.uint8)
    return compressor.compress(plain.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a manifest says of a range, and the coding that a blob has of it."""

    said: RangeDigest
    coded: memoryview


def decode_sparse(
    pieces: Sequence[Piece], *, dtype: np.dtype[Any], decompressor: zstandard.ZstdDecompressor
) -> tuple[Positions, Bits]:
    """Where to add what, for deltas one after another: positions in the whole tensor, each within its own range, and
    one position as often as it is changed. Or WeightsError.

    Together, since most of what a small range costs is the calls and not the elements.
    """
    plains = [_expand(piece, dtype=dtype, decompressor=decompressor) for piece in pieces]
    counts = [piece.said.num_changed for piece in pieces]
    steps = _join_planes(plains, counts, (0, 1), np.dtype("<u2"))
    steps += 1  # from gaps to the distance between positions; an escape becomes 0
    wide = [plain[count * (2 + dtype.itemsize) :].view("<u4") for plain, count in zip(plains, counts, strict=True)]
    bounds = [0, *accumulate(counts)]
    escaped = np.flatnonzero(steps == 0)
    if np.diff(np.searchsorted(escaped, bounds)).tolist() != [len(gaps) for gaps in wide]:
        raise WeightsError("a delta's wide gaps do not agree with its gaps")
    positions: Positions = steps.astype(np.int64)
    positions[escaped] = np.concatenate(wide) + np.int64(1)
    for piece, begin, end in zip(pieces, bounds, bounds[1:], strict=False):
        own = positions[begin:end]
        own[0] += piece.said.start - 1
        np.cumsum(own, out=own)
        if own[-1] >= piece.said.start + piece.said.length:
            raise WeightsError("a delta points beyond its range")
    folded = _join_planes(plains, counts, range(2, 2 + dtype.itemsize), dtype)
    return positions, _unzigzag(folded)


def _expand(piece: Piece, *, dtype: np.dtype[Any], decompressor: zstandard.ZstdDecompressor) -> npt.NDArray[np.uint8]:
    """Decompress, having checked that no more is built than the range can need."""
    said, fixed = piece.said, piece.said.num_changed * (2 + dtype.itemsize)
    try:
        size = zstandard.frame_content_size(piece.coded)
        if not fixed <= size <= fixed + 4 * (said.length // _WIDE) or (size - fixed) % 4:
            raise WeightsError(f"a delta of {said.num_changed} elements claims to expand to {size} bytes")
        plain = decompressor.decompress(piece.coded, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a delta does not decompress: {error}") from None
    if len(plain) != size:
        raise WeightsError(f"a delta expands to {len(plain)} bytes instead of {size}")
    return np.frombuffer(plain, dtype=np.uint8)


def _split_planes(values: Bits, planes: npt.NDArray[np.uint8]) -> None:
    """[itemsize, n]: the values' bytes by significance, lowest first."""
    for number, plane in enumerate(planes):
        np.right_shift(values, 8 * number, out=plane, casting="unsafe")


def _join_planes(
    plains: Sequence[npt.NDArray[np.uint8]], counts: Sequence[int], numbers: Iterable[int], dtype: np.dtype[Any]
) -> Bits:
    """The values of all, one after another, of which these planes have the bytes, lowest first. By shifts: to
    transpose bytes takes ten times as long."""
    planes = [
        np.concatenate([plain[number * n : (number + 1) * n] for plain, n in zip(plains, counts, strict=True)])
        for number in numbers
    ]
    values: Bits = planes[-1].astype(dtype)
    for plane in planes[-2::-1]:
        values <<= 8
        values |= plane
    return values


def _zigzag(difference: Bits) -> Bits:
    signed = difference.view(f"<i{difference.itemsize}")
    folded: Bits = ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)
    return folded


def _unzigzag(folded: Bits) -> Bits:
    one = folded.dtype.type(1)
    difference: Bits = (folded >> one) ^ (~(folded & one) + one)
    return difference


def threads_for(num_versions: int) -> int:
    return 1 if num_versions == 1 else min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def side_by_side(work: Callable[[T], None], items: Iterable[T], *, num_threads: int) -> None:
    """The first error ends it, once what is under way has ended."""
    if num_threads == 1:
        for item in items:
            work(item)
        return
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="patching")
    try:
        for _ in pool.map(work, items):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def patch(
    tensors: Mapping[str, Bits],
    manifests: Sequence[Manifest],
    blobs: Mapping[str, bytes],
    *,
    num_threads: int,
    changes: ChangeLog | None = None,  # notes where
) -> set[str]:
    """Deltas, each on the one before, with all of their blobs; gives the tensors that they changed.

    WeightsError: something does not decode, and nobody knows what the tensors hold now.
    """
    noting = ChangeLog() if changes is None else changes
    noting.going_on()
    stretches = list(columns(manifests, blobs))
    side_by_side(lambda column: _patch_column(tensors, column, noting), stretches, num_threads=num_threads)
    return {column[0].said.tensor for column in stretches}


def _patch_column(tensors: Mapping[str, Bits], column: Sequence[Piece], changes: ChangeLog) -> None:
    first = column[0].said
    tensor = tensors[first.tensor]
    decompressor = zstandard.ZstdDecompressor()  # one of its own: they serve a single thread, and cost little to make
    for pieces in batches(column, alone=_is_raw, size=lambda piece: piece.said.num_changed, at_most=_AT_ONCE):
        said = pieces[0].said
        if _is_raw(pieces[0]):
            tensor[said.start : said.start + said.length] = np.frombuffer(pieces[0].coded, tensor.dtype)
            changes.note_whole(said.tensor)
        else:
            positions, differences = decode_sparse(pieces, dtype=tensor.dtype, decompressor=decompressor)
            # A position may come more than once, and sums do not mind; twice as fast as reading and writing.
            np.add.at(tensor, positions, differences)
            changes.note(said.tensor, positions, start=first.start, num_elements=len(tensor))


def batches(
    items: Iterable[T], *, alone: Callable[[T], bool], size: Callable[[T], int], at_most: int
) -> Iterator[list[T]]:
    """In order: what goes alone, by itself; all else together, up to this size where one alone is not larger."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and (alone(item) or alone(batch[0]) or total + size(item) > at_most):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def _is_raw(piece: Piece) -> bool:
    return piece.said.coding is Coding.RAW


def columns(manifests: Sequence[Manifest], blobs: Mapping[str, bytes]) -> Iterator[list[Piece]]:
    """What changes in each stretch, in the order of the manifests, which are deltas, each on the one before."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    starts: dict[str, set[int]] = {}  # where all so far have a cut
    for manifest in manifests:
        own: dict[str, set[int]] = defaultdict(set)
        for shard in manifest.shards:
            blob = memoryview(blobs[shard.blob_name])
            for part, place in shard.parts():
                if part.coding in (Coding.PRETRAINED, Coding.MERGED):
                    continue
                own[part.tensor].add(part.start)
                if part.coding is not Coding.SAME:
                    pieces[part.tensor].append(Piece(said=part, coded=blob[place]))
        starts = {tensor: cuts & starts.get(tensor, cuts) for tensor, cuts in own.items()}
    for tensor, changed in pieces.items():
        cuts, stretches = sorted(starts[tensor]), defaultdict[int, list[Piece]](list)
        for piece in changed:
            stretches[bisect_right(cuts, piece.said.start)].append(piece)
        yield from stretches.values()
