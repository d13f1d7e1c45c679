"""The sparse coding of one range against its base, as `format` specifies it, in both directions.

    new, base ─► `Codec.changes` ─► plain bytes ─► zstd ─► blob ─► `expand` ─► plain bytes ─► `Codec.add` ─► the tensor

`InPasses` uses numpy passes, which are enough for small models and need no other package. `kernels` does the same in
one pass, and `Codecs` chooses between them. The work is bound by memory: the new state and the base are each read once
from memory, in chunks that stay in the cache, and compared and digested while they are there.

The kernels cost half a second of imports and, the first time on a machine, some seconds of compiling: more than a small
model's deltas ever cost. A large model's first anchor announces that deltas will follow: from then on a thread compiles
beside whatever is done with the anchor. The first caller that needs the kernels blocks until they are ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import xxhash
import zstandard

from streamrl.errors import WeightsError
from streamrl.protocol.weights.changes import Positions
from streamrl.protocol.weights.format import Bits, RangeRecord

Places = npt.NDArray[np.int32]  # [n] strictly increasing; int32 is enough within a range
Bytes = npt.NDArray[np.uint8]

CHUNK = 1 << 19  # elements compared at a time: 1 MB of bf16 on each side
WIDE = 0xFFFF
_GROUP = 8  # flags per machine word
_DENSE = 0.5  # above this share of touched groups, looking at every flag is faster
WIDE_GAPS_DISAGREE = "a delta's wide gaps do not agree with its gaps"
_WORTH_BYTES = 64 << 20  # of tensors: a delta of this size becomes some 30 ms cheaper

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where and how a range differs from its base."""

    num_changed: int
    plain: Bytes  # the blob holds it compressed; empty if nothing changed
    digest: bytes  # of the new state


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRange:
    """A range's entry in the manifest, with its coded bytes in the blob."""

    record: RangeRecord
    data: memoryview


class Codec(Protocol):
    def changes(self, new: Bits, old: Bits) -> Found:
        """Find the changes of at most MAX_RANGE_ELEMENTS. Not thread-safe."""
        ...

    def add(self, ranges: Sequence[CodedRange], plains: Sequence[Bytes], tensor: Bits) -> Positions:
        """Patch the tensor with these deltas in order and return the positions.

        WeightsError: the contents of their ranges are undefined. Thread-safe for separate ranges.
        """
        ...


class InPasses:
    """The codec in numpy passes."""

    def changes(self, new: Bits, old: Bits) -> Found:
        changes, digest = scan(new, old)
        plain = plain_of(changes.positions, changes.differences)
        return Found(num_changed=len(changes.positions), plain=plain, digest=digest)

    def add(self, ranges: Sequence[CodedRange], plains: Sequence[Bytes], tensor: Bits) -> Positions:
        positions, differences = decode(ranges, plains, dtype=tensor.dtype)
        # Sums allow duplicate positions, and this is twice as fast as reading and writing.
        np.add.at(tensor, positions, differences)
        return positions


class Codecs:
    """The codec of one encoder or mirror."""

    def __init__(self) -> None:
        self._passes = InPasses()
        self._compiled: Future[Codec] | None = None

    def expect(self, num_bytes: int) -> None:
        """Prepare for deltas of tensors with this many bytes."""
        if self._compiled is None and num_bytes >= _WORTH_BYTES:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")
            self._compiled = thread.submit(_compiled)
            thread.shutdown(wait=False)

    def get(self) -> Codec:
        return self._passes if self._compiled is None else self._compiled.result()


def _compiled() -> Codec:
    try:
        from streamrl.protocol.weights.kernels import Compiled  # numba
    except ImportError as error:  # not installed, or not compatible with this numpy
        log.info("deltas_without_kernels", reason=str(error))
        return InPasses()
    return Compiled()


def beyond_range() -> WeightsError:
    return WeightsError("a delta points beyond its range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Where a range differs from its base."""

    positions: Places  # [n] from the range's start
    differences: Bits  # [n] of the bit patterns: new - old, modulo their width


def scan(new: Bits, old: Bits) -> tuple[Changes, bytes]:
    """Return the changes and the digest of `new`, which has less than 2^31 elements."""
    state = xxhash.xxh3_128()
    differs = np.zeros(min(CHUNK, len(new) + _GROUP), dtype=np.bool_)
    found: list[tuple[Places, Bits]] = []
    for begin in range(0, len(new), CHUNK):
        chunk, base = new[begin : begin + CHUNK], old[begin : begin + CHUNK]
        state.update(chunk.data)
        np.not_equal(chunk, base, out=differs[: len(chunk)])
        padded = -(-len(chunk) // _GROUP) * _GROUP
        differs[len(chunk) : padded] = False
        where = _nonzero(differs[:padded])
        if len(where):  # read the values while they are in the cache
            found.append(((where + begin).astype(np.int32), chunk[where] - base[where]))
    none = np.empty(0, dtype=np.int32), new[:0]
    positions, differences = (np.concatenate(parts) for parts in zip(none, *found, strict=True))
    return Changes(positions=positions, differences=differences), state.digest()


def _nonzero(flags: npt.NDArray[np.bool_]) -> Positions:
    """np.flatnonzero, about twice as fast where few are set: it first tests eight flags as one integer."""
    groups = flags.view(np.uint64)
    touched = np.flatnonzero(groups != 0)
    if len(touched) > _DENSE * len(groups):
        return np.flatnonzero(flags)
    lanes = np.flatnonzero(groups[touched].view(np.bool_))
    positions: Positions = (touched[lanes >> 3] << 3) | (lanes & 7)
    return positions


def plain_of(positions: Places, differences: Bits) -> Bytes:
    """Return the plain bytes (before compression) of these differences at these positions."""
    num_changed = len(positions)
    gaps = np.diff(positions, prepend=-1).astype(np.uint32) - np.uint32(1)
    wide = gaps[gaps >= WIDE]
    if len(wide):
        gaps = np.minimum(gaps, np.uint32(WIDE))
    width = 2 + differences.itemsize
    plain = np.empty(num_changed * width + wide.nbytes, dtype=np.uint8)
    planes = plain[: num_changed * width].reshape(width, num_changed)
    _split_planes(gaps, planes[:2])
    _split_planes(_zigzag(differences), planes[2:])
    plain[num_changed * width :] = wide.view(np.uint8)
    return plain


def expand(coded: CodedRange, *, dtype: np.dtype[Any], decompressor: zstandard.ZstdDecompressor) -> Bytes:
    """Decompress, after checking that the size is at most what the range can need."""
    record, fixed = coded.record, coded.record.num_changed * (2 + dtype.itemsize)
    try:
        size = zstandard.frame_content_size(coded.data)
        if not fixed <= size <= fixed + 4 * (record.length // WIDE) or (size - fixed) % 4:
            raise WeightsError(f"a delta of {record.num_changed} elements claims to expand to {size} bytes")
        plain = decompressor.decompress(coded.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a delta does not decompress: {error}") from None
    if len(plain) != size:
        raise WeightsError(f"a delta expands to {len(plain)} bytes instead of {size}")
    return np.frombuffer(plain, dtype=np.uint8)


def decode(ranges: Sequence[CodedRange], plains: Sequence[Bytes], *, dtype: np.dtype[Any]) -> tuple[Positions, Bits]:
    """Decode consecutive deltas into positions in the whole tensor and what to add there, or raise WeightsError.

    A position occurs as often as it is changed. All deltas are decoded together, since the calls cost most for small
    ranges.
    """
    counts = [coded.record.num_changed for coded in ranges]
    steps = _join_planes(plains, counts, (0, 1), np.dtype("<u2"))
    steps += 1  # from gaps to the distance between positions; an escape becomes 0
    wide = [plain[count * (2 + dtype.itemsize) :].view("<u4") for plain, count in zip(plains, counts, strict=True)]
    bounds = [0, *accumulate(counts)]
    escaped = np.flatnonzero(steps == 0)
    if np.diff(np.searchsorted(escaped, bounds)).tolist() != [len(gaps) for gaps in wide]:
        raise WeightsError(WIDE_GAPS_DISAGREE)
    positions: Positions = steps.astype(np.int64)
    positions[escaped] = np.concatenate(wide) + np.int64(1)
    for coded, begin, end in zip(ranges, bounds, bounds[1:], strict=False):
        own = positions[begin:end]
        own[0] += coded.record.start - 1
        np.cumsum(own, out=own)
        if own[-1] >= coded.record.start + coded.record.length:
            raise beyond_range()
    folded = _join_planes(plains, counts, range(2, 2 + dtype.itemsize), dtype)
    return positions, _unzigzag(folded)


def _split_planes(values: Bits, planes: Bytes) -> None:
    """Write the values' bytes by significance to `planes` [itemsize, n], lowest first."""
    for number, plane in enumerate(planes):
        np.right_shift(values, 8 * number, out=plane, casting="unsafe")


def _join_planes(plains: Sequence[Bytes], counts: Sequence[int], numbers: Iterable[int], dtype: np.dtype[Any]) -> Bits:
    """Join byte planes, lowest first, into the values of all deltas, concatenated.

    Uses shifts: transposing bytes takes ten times as long.
    """
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
