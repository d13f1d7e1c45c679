"""The sparse coding in one pass over memory, compiled by numba: the same bytes as the numpy passes in `sparse`.

    new, base ─► 64 elements of each compared at once ─► a bit for each that differs ─► gaps and values, as bytes

The kernels release the GIL. Importing this module imports numba (half a second, 70 MB). Compiling takes some seconds,
and almost nothing when numba finds its cache on disk: in NUMBA_CACHE_DIR, beside this file, or in the user's cache
folder. If none of these is writable, it compiles each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import xxhash
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from streamrl.errors import WeightsError
from streamrl.protocol.weights.changes import Positions
from streamrl.protocol.weights.format import MAX_RANGE_ELEMENTS, Bits
from streamrl.protocol.weights.sparse import CHUNK, WIDE, WIDE_GAPS_DISAGREE, Bytes, CodedRange, Found, beyond_range

_LANES = 64  # elements compared at once: their flags fill a machine word
_AGREES, _WIDE_DISAGREES, _BEYOND = range(3)


class Compiled:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._find, self._add = _kernels()
        # By itemsize. Kept, because new memory is faulted in page by page; unused parts take none.
        self._planes: dict[int, Bytes] = {}

    def changes(self, new: Bits, old: Bits) -> Found:
        assert len(new) == len(old) <= MAX_RANGE_ELEMENTS, "the kernel looks no further than it is told to"
        planes, wide = self._planes_for(new.itemsize), np.empty(len(new) // WIDE + 1, dtype=np.uint32)
        digest = xxhash.xxh3_128()
        last, num, num_wide = -1, 0, 0
        for begin in range(0, len(new), CHUNK):
            piece = new[begin : begin + CHUNK]
            digest.update(piece.data)  # leaves the piece in the cache for the kernel
            base = old[begin : begin + CHUNK]
            last, num, num_wide = self._find(piece, base, begin, last, num, num_wide, planes, wide)
        fixed = planes[:, :num]
        plain = np.empty(fixed.size + 4 * num_wide, dtype=np.uint8)
        np.copyto(plain[: fixed.size].reshape(fixed.shape), fixed)
        plain[fixed.size :] = wide[:num_wide].view(np.uint8)
        return Found(num_changed=num, plain=plain, digest=digest.digest())

    def add(self, ranges: Sequence[CodedRange], plains: Sequence[Bytes], tensor: Bits) -> Positions:
        positions = np.empty(sum(coded.record.num_changed for coded in ranges), dtype=np.int64)
        begin = 0
        for coded, plain in zip(ranges, plains, strict=True):
            record = coded.record
            outcome = self._add(plain, record.num_changed, record.start, record.length, tensor, positions[begin:])
            if outcome != _AGREES:
                raise WeightsError(WIDE_GAPS_DISAGREE) if outcome == _WIDE_DISAGREES else beyond_range()
            begin += record.num_changed
        return positions

    def _planes_for(self, itemsize: int) -> Bytes:
        if itemsize not in self._planes:
            self._planes[itemsize] = np.empty((2 + itemsize, MAX_RANGE_ELEMENTS), dtype=np.uint8)
        return self._planes[itemsize]


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile once for all encoders and mirrors of a process."""
    words = types.uint16, types.uint32
    find = compiled(_find, [_find_signature(word) for word in words])
    return find, compiled(_add, [_add_signature(word) for word in words])


def compiled(function: Callable[..., Any], signatures: list[Any]) -> Callable[..., Any]:
    try:
        return numba.njit(signatures, nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except (RuntimeError, OSError):  # no folder for the cache, or it is full
        return numba.njit(signatures, nogil=True)(function)  # type: ignore[no-any-return]


def _array(word: Any, *, ndim: int = 1, readonly: bool = True) -> Any:
    return types.Array(word, ndim, "C", readonly=readonly, aligned=False)


def _find_signature(word: Any) -> Any:
    number, wide = types.int64, _array(types.uint32, readonly=False)
    planes = _array(types.uint8, ndim=2, readonly=False)
    told = types.UniTuple(number, 3)
    return told(_array(word), _array(word), number, number, number, number, planes, wide)


def _add_signature(word: Any) -> Any:
    number, positions = types.int64, _array(types.int64, readonly=False)
    return number(_array(types.uint8), number, number, number, _array(word, readonly=False), positions)


@intrinsic  # type: ignore[untyped-decorator]
def _differing(typing: Any, new: Any, old: Any, at: Any) -> Any:
    """Set bit i where the elements `at + i` differ. LLVM IR, because numba makes no such vector of flags of a loop: one
    that compares blocks and then looks at each element takes three times as long, which is what numpy takes.
    """
    del typing

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(signature.args[0].dtype.bitwidth)
        vector = ir.VectorType(element, _LANES)
        loaded = []
        for kind, array in zip(signature.args[:2], args[:2], strict=True):
            data = arrayobj.make_array(kind)(context, builder, array).data
            place = builder.bitcast(builder.gep(data, [args[2]]), vector.as_pointer())
            loaded.append(builder.load(place, align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(_LANES))

    return types.uint64(new, old, types.intp), build


@intrinsic  # type: ignore[untyped-decorator]
def _lowest(typing: Any, flags: Any) -> Any:
    """Return the index of the lowest set bit; at least one must be set."""
    del typing, flags

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), build


@intrinsic  # type: ignore[untyped-decorator]
def _itemsize(typing: Any, array: Any) -> Any:
    """Return the itemsize as a compile-time constant, which `array.itemsize` is not in a loop over bytes."""
    del typing

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        del builder, args
        return context.get_constant(types.int64, signature.args[0].dtype.bitwidth // 8)

    return types.int64(array), build


def _find(
    new: Bits, old: Bits, begin: int, last: int, num: int, num_wide: int, planes: Bytes, wide: Bits
) -> tuple[int, int, int]:
    """Find the changes in a chunk that begins at `begin`, after `num` earlier ones, of which the last is at `last`."""
    itemsize = _itemsize(new)
    for block in range(0, len(new), _LANES):
        if block + _LANES <= len(new):
            flags = _differing(new, old, block)
        else:
            flags = np.uint64(0)
            for i in range(block, len(new)):
                if new[i] != old[i]:
                    flags |= np.uint64(1) << np.uint64(i - block)
        while flags != 0:
            i = block + _lowest(flags)
            flags &= flags - np.uint64(1)
            gap = begin + i - last - 1
            last = begin + i
            if gap >= WIDE:
                wide[num_wide] = gap
                num_wide += 1
                gap = WIDE
            planes[0, num] = gap & 0xFF
            planes[1, num] = gap >> 8
            bits = 8 * itemsize
            difference = (np.int64(new[i]) - np.int64(old[i])) & ((1 << bits) - 1)
            folded = (difference << 1) ^ -(difference >> (bits - 1))
            for byte in range(itemsize):
                planes[2 + byte, num] = (folded >> (8 * byte)) & 0xFF
            num += 1
    return last, num, num_wide


def _add(plain: Bytes, num: int, start: int, length: int, tensor: Bits, positions: Positions) -> int:
    """Patch one range of the tensor and write its positions; change nothing if a position lies beyond the range."""
    itemsize = _itemsize(tensor)
    wide_at = num * (2 + itemsize)
    at = start - 1
    low, high = plain[:num], plain[num : 2 * num]
    for i in range(num):
        gap: Any = np.int64(low[i]) | np.int64(high[i]) << 8
        if gap == WIDE:
            if wide_at + 4 > len(plain):
                return _WIDE_DISAGREES
            gap = np.int64(0)
            for byte in range(4):
                gap |= np.int64(plain[wide_at + byte]) << (8 * byte)
            wide_at += 4
        at += gap + 1
        if at >= start + length:
            return _BEYOND
        positions[i] = at
    if wide_at != len(plain):
        return _WIDE_DISAGREES
    # A loop of its own: with less work per element, more memory accesses overlap.
    values = plain[2 * num :]
    for i in range(num):
        folded = np.int64(values[i])
        for byte in range(1, itemsize):
            folded |= np.int64(values[np.uint64(byte * num + i)]) << (8 * byte)
        tensor[np.uint64(positions[i])] += (folded >> 1) ^ -(folded & 1)
    return _AGREES
