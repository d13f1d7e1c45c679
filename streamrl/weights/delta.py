"""One range against its base: find what changed, code it, patch it back in. The specification is in `format`.

Nothing here waits. The work is bound by memory: the new state and the base are each read once from memory, in pieces
that fit the second-level cache, and compared and digested while they are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from streamrl.errors import WeightsError
from streamrl.weights.format import Bits

Positions = npt.NDArray[np.int64]  # [n] strictly increasing

_CHUNK = 1 << 18  # elements compared at a time: 0.5 MB of bf16 on each side
_WIDE = 0xFFFF
_GROUP = 8  # flags in a machine word
_DENSE = 0.5  # above this share of touched groups, looking at every flag is faster


def scan(new: Bits, old: Bits) -> tuple[Positions, bytes]:
    """Positions where the bit patterns differ, and the digest of `new`."""
    state = xxhash.xxh3_128()
    differs = np.zeros(min(_CHUNK, len(new) + _GROUP), dtype=np.bool_)
    found = []
    for begin in range(0, len(new), _CHUNK):
        piece = new[begin : begin + _CHUNK]
        state.update(piece.data)
        np.not_equal(piece, old[begin : begin + _CHUNK], out=differs[: len(piece)])
        padded = -(-len(piece) // _GROUP) * _GROUP
        differs[len(piece) : padded] = False
        positions = _nonzero(differs[:padded])
        if len(positions):
            positions += begin
            found.append(positions)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64), state.digest()


def _nonzero(flags: npt.NDArray[np.bool_]) -> Positions:
    """np.flatnonzero, about twice as fast where few are set: eight flags are first looked at as one integer."""
    groups = flags.view(np.uint64)
    touched = np.flatnonzero(groups != 0)
    if len(touched) > _DENSE * len(groups):
        return np.flatnonzero(flags)
    lanes = np.flatnonzero(groups[touched].view(np.bool_))
    positions: Positions = (touched[lanes >> 3] << 3) | (lanes & 7)
    return positions


def encode_sparse(positions: Positions, differences: Bits, compressor: zstandard.ZstdCompressor) -> bytes:
    """At least one position, and the difference of the bit patterns there: new - old, modulo their width."""
    num_changed = len(positions)
    gaps = np.empty(num_changed, dtype=np.int64)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    wide = gaps[gaps >= _WIDE].astype("<u4")
    width = 2 + differences.itemsize
    plain = np.empty(num_changed * width + wide.nbytes, dtype=np.uint8)
    planes = plain[: num_changed * width].reshape(width, num_changed)
    planes[:2] = _bytes_of(np.minimum(gaps, _WIDE).astype("<u2"))
    planes[2:] = _bytes_of(_zigzag(differences))
    plain[num_changed * width :] = wide.view(np.uint8)
    return compressor.compress(plain.data)


def decode_sparse(
    data: memoryview, *, num_changed: int, length: int, dtype: np.dtype[Any], decompressor: zstandard.ZstdDecompressor
) -> tuple[Positions, Bits]:
    """Positions within [0, length) and the differences to add there, or WeightsError."""
    plain = _expand(data, num_changed=num_changed, length=length, dtype=dtype, decompressor=decompressor)
    width = 2 + dtype.itemsize
    planes = plain[: num_changed * width].reshape(width, num_changed)
    gaps = _from_bytes(planes[:2], np.dtype("<u2")).astype(np.int64)
    wide = plain[num_changed * width :].view("<u4")
    escaped = np.flatnonzero(gaps == _WIDE)
    if len(escaped) != len(wide):
        raise WeightsError("a delta's wide gaps do not agree with its gaps")
    gaps[escaped] = wide
    gaps += 1
    positions: Positions = np.cumsum(gaps, out=gaps)
    positions -= 1
    if positions[-1] >= length:
        raise WeightsError("a delta points beyond its range")
    return positions, _unzigzag(_from_bytes(planes[2:], dtype))


def _expand(
    data: memoryview, *, num_changed: int, length: int, dtype: np.dtype[Any], decompressor: zstandard.ZstdDecompressor
) -> npt.NDArray[np.uint8]:
    """Decompress, having checked that no more is built than the range can need."""
    fixed = num_changed * (2 + dtype.itemsize)
    try:
        size = zstandard.frame_content_size(data)
        if not fixed <= size <= fixed + 4 * (length // _WIDE) or (size - fixed) % 4:
            raise WeightsError(f"a delta of {num_changed} elements claims to expand to {size} bytes")
        plain = decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a delta does not decompress: {error}") from None
    if len(plain) != size:
        raise WeightsError(f"a delta expands to {len(plain)} bytes instead of {size}")
    return np.frombuffer(plain, dtype=np.uint8)


def _bytes_of(values: Bits) -> npt.NDArray[np.uint8]:
    """[itemsize, n]: the values' bytes by significance, lowest first."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T


def _from_bytes(planes: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> Bits:
    """The inverse of `_bytes_of`; by shifts, since to transpose bytes takes ten times as long."""
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
