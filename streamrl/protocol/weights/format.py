"""The format of published weights: a specification for other programs, and the vocabulary of this package.

Version 2. All integers are little-endian. A *digest* is the xxh3_128 of some bytes, seed 0, in its canonical form: 16
bytes, most significant first. It detects accidents (bit flips, truncation, mix-ups). Permissions protect against people
who could write to the store, and the SHA-256 of each piece against a worker that forwards a blob to others.

**Tensors.** A version is a list of tensors: name, dtype (float32, bfloat16, float16) and shape. Only *bit patterns*
count, so NaN payloads and negative zeros survive. The elements of a tensor are numbered in row-major order from 0: its
flat coordinates, which do not depend on how many ranks hold it. A tensor with a zero in its shape has no elements.

**Versions.** `term << 32 | n`. An *anchor* (base 0) holds all bits. A *delta* holds what changed against the version
that it names as its base; the base is always smaller, so a chain of deltas ends at an anchor. A delta may have an
anchor *beside* it: all bits of the very same state, in blobs of their own, for readers far behind. A reader
that has the base takes the delta. The rules for anchors hold for both kinds, beside a delta or alone.

**Ranges.** Every rank of the learner holds ranges `[start, start + length)` of tensors, at most MAX_RANGE_ELEMENTS long
(longer ones are cut, so that memory on both sides is bounded). Together the ranges of a version cover every element of
every tensor exactly once, in deltas too. Each carries the digest of its *new* state: the little-endian bytes of all its
elements. Each has one coding:

    SAME   (0)  the range equals the base's. No bytes. Never in an anchor.
    RAW    (1)  the elements' bytes, `length * itemsize` of them. Always so in an anchor, but for 3 and 4.
    SPARSE (2)  only what changed, n = num_changed >= 1 elements, where that is smaller than RAW: one zstd frame that
                states its content size and expands to

        gaps, low bytes      n bytes               where: gap[i] = position[i] - position[i - 1] - 1, and
        gaps, high bytes     n bytes                 gap[0] = position[0]; positions count from the range's start
        values, byte 0       n bytes               what: z[i], the zigzag code of the bit patterns' difference
        ...                                          d = new - old (mod 2^bits): z = d << 1 for d < 2^(bits - 1),
        values, byte w - 1   n bytes                 else ~(d << 1); w is the itemsize
        wide gaps            m x u32               a gap of 65,535 or more is written as 65,535 above and in full
                                                     here, in order; m is the number of such

      Bytes of one significance lie together, because they compress alike. Differences beat xor, since an optimizer's
      step moves most changed values to a neighbour: z is then 1 or 2.

    PRETRAINED (3)  the pretrained model's elements, cast to the tensor's dtype. No bytes: readers have its files.
    MERGED (4)  no bytes, and not part of the cover: the digest of the range after merging (see below).

**Adapters** (LoRA). The model's own tensors are PRETRAINED, in deltas too; the adapters' are coded like any others. An
adapter names a tensor, its two factors A [r, k] and B [n, r], a scale s, and whether the tensor is laid out as (B A)^T.
Workers serve, instead of that tensor W,

    W + s (B A)        computed in float64, cast to float32 and from there to the tensor's dtype, to nearest even

in this order: the product, times s, plus W. With factors in bfloat16 every sum in B A is exact in float64, so all
programs and processors get the same bits. Factors in float32 are split first, each into its bfloat16 and the rest, and
their products are added in the order hi hi, hi lo, lo hi, lo lo (B's half first). Each version has the learner's
digests of some merged ranges, with which readers compare their own.

**Blobs.** One rank's part of a version, with delta and anchor in separate blobs: the codings of its ranges, back to
back in the order of the manifest. A blob is named `{run_uid}/{term:06d}/{n}-{rank}-{digest of the blob in hex}`. Names
follow BLOB_NAME and have no empty part and none that begins with a dot. Blobs are never overwritten: other bytes under
its name are an error.

**Pieces.** A blob is cut into pieces of `piece_bytes`, a power of two; the last may be shorter. Pieces that a
reader gets from elsewhere than the store are each checked against the SHA-256 in the record.

**Manifest.** `SRLWGT02`, the digest of what follows, and one zstd frame that states its content size (at most
MAX_MANIFEST_BYTES) and expands to a msgpack map:

    schema      1
    version, base, step, run_uid
    names       the tensors' names, joined by newlines; printable, without duplicates
    num_tensors
    dtypes      u8 per tensor: index into float32, bfloat16, float16
    ranks       u8 per tensor: number of dimensions
    num_dims, dims    u64 per dimension, tensor after tensor
    shards      a list of records, one per blob
    anchor      likewise, for the anchor beside a delta; empty: none
    num_canary_tokens, canary_ids    i32 each: a sequence for readers to test their engines with; 0: none
    num_adapters        omitted, with the rest, if there are none; else for each:
    adapters    u32 x 3: the tensor, A, B, as indices into names
    transposed  u8: 0 or 1
    scales      f64

A record is itself such a map, packed into bytes (a rank sends it to rank 0 in this form):

    schema      1
    blob_name, num_bytes, digest
    piece_bytes, pieces     32 bytes a piece: their SHA-256, in order
    names       the tensors of its ranges, joined by newlines
    num_ranges, and per range: tensors u32 (index into names), starts u64, lengths u32, codings u8,
                num_changed u32, sizes u32 (bytes in the blob), digests 16 bytes

**Reading a version.** Take an anchor, of this version or an older one, and the deltas after it. For each, fetch the
blobs, check their digests, and apply every range, in any order within a version, and in the order of versions within a
range. Then compare the digests of the ranges with those in the last manifest: if they agree, the bits are those that
the learner published, whatever path led there.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.errors import WeightsError
from streamrl.versions import number_of, term_of

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")  # the wire's numbers: append only
BITS: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype("<u4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
}

MAGIC = b"SRLWGT02"
DIGEST_BYTES = 16
PIECE_DIGEST_BYTES = 32
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 1 << 10, 8 << 20
_USUAL_PIECE_BYTES = 256 << 10  # at least this, since each costs a request; more if there would be too many pieces
_USUAL_PIECES = 256
MAX_MANIFEST_BYTES = 64 << 20
MAX_RANGE_ELEMENTS = 1 << 22  # 8 MB of bf16: fits the last-level cache, so that several passes cost as much as one
MAX_TENSOR_ELEMENTS = 1 << 40
BLOB_NAME = re.compile(r"[a-z0-9][a-z0-9._/-]{0,200}")

Bits = npt.NDArray[Any]  # [length] uint16 or uint32, little-endian


class Coding(IntEnum):
    SAME = 0
    RAW = 1
    SPARSE = 2
    PRETRAINED = 3
    MERGED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * BITS[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """Elements [start, start + len(bits)) of a tensor, in the flat coordinates of the full tensor."""

    tensor: str
    start: int
    # [length] contiguous; a copy or cast of the parameter. It is the base of the next version: do not write to it
    # before that version is announced.
    bits: Bits


class RangeRecord(NamedTuple):
    """The manifest's entry for one range; a named tuple, because many are read at a time."""

    tensor: str
    start: int
    length: int  # elements
    coding: Coding
    num_changed: int  # elements that differ from the base; in an anchor, all
    num_bytes: int  # of its coding in the blob
    digest: bytes  # of the new state


def digest_of(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def piece_bytes_of(num_bytes: int) -> int:
    """Return the piece size of a blob that is published here; readers use the size in the record."""
    piece_bytes = _USUAL_PIECE_BYTES
    while piece_bytes < MOST_PIECE_BYTES and piece_bytes * _USUAL_PIECES < num_bytes:
        piece_bytes *= 2
    return piece_bytes


def digests_of_pieces(blob: bytes | memoryview, piece_bytes: int) -> bytes:
    whole = memoryview(blob)
    starts = range(0, len(whole), piece_bytes)
    return b"".join(hashlib.sha256(whole[start : start + piece_bytes]).digest() for start in starts)


def blob_name(*, run_uid: str, version: int, rank: int, digest: bytes) -> str:
    name = f"{run_uid}/{term_of(version):06d}/{number_of(version)}-{rank}-{digest.hex()}"
    check_blob_name(name)
    return name


def check_blob_name(name: str) -> None:
    """Reject names from a message that lead outside the store's folder or keys."""
    hidden = any(part == "" or part.startswith(".") for part in name.split("/"))
    if hidden or not BLOB_NAME.fullmatch(name):
        raise WeightsError(f"not the name of a blob: {name!r:.250}")
