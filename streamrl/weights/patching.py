"""Deltas into the tensors that they change: each stretch with all of its deltas at once, stretches side by side.

    columns ─► thread: decode a column's deltas together ─► add them where they belong ─► next column
              thread: ...

Columns share no element, so threads need not know of each other. One delta is patched by one thread, because a worker
generates meanwhile; who is far behind generates nothing of use, and takes the cores that there are. Blocks on nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import zstandard

from streamrl.weights.columns import Piece, columns
from streamrl.weights.delta import Positions, Sparse, decode_sparse
from streamrl.weights.format import Bits, Coding
from streamrl.weights.manifest import Manifest

T = TypeVar("T")
Change = tuple[Positions, Bits]  # where, growing, and by how much

_MOST_THREADS = 4  # the memory is busy with so many
_DECODED_AT_ONCE = 1 << 16  # changed elements: what is decoded of them stays in the cache
_ADDED_AT_ONCE = 1 << 19  # changed elements: bounds the memory of a thread
WINDOW = 1 << 19  # elements of a tensor: 1 MB of bf16, which the second-level cache holds
_DENSE = 0.016  # above this share of changed elements, reading a window as a whole takes less than finding them in it


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
    tensors: Mapping[str, Bits], manifests: Sequence[Manifest], blobs: Mapping[str, bytes], *, num_threads: int
) -> set[str]:
    """Deltas, each on the one before, with all of their blobs; gives the tensors that they changed.

    WeightsError: something does not decode, and nobody knows what the tensors hold now.
    """
    stretches = list(columns(manifests))
    side_by_side(lambda column: _patch_column(tensors, column, blobs), stretches, num_threads=num_threads)
    return {column[0].said.tensor for column in stretches}


def _patch_column(tensors: Mapping[str, Bits], column: Sequence[Piece], blobs: Mapping[str, bytes]) -> None:
    tensor = tensors[column[0].said.tensor]
    decompressor = zstandard.ZstdDecompressor()  # one of its own: they serve a single thread, and cost little to make
    for pieces in _batches(column, most=_ADDED_AT_ONCE):
        said = pieces[0].said
        if said.coding is Coding.RAW:
            tensor[said.start : said.start + said.length] = np.frombuffer(_payload(pieces[0], blobs), tensor.dtype)
        else:
            changes: list[Change] = []
            for few in _batches(pieces, most=_DECODED_AT_ONCE):
                codings = [_sparse(piece, blobs) for piece in few]
                changes += _apart(few, *decode_sparse(codings, dtype=tensor.dtype, decompressor=decompressor))
            _add(tensor, changes)


def _apart(pieces: Sequence[Piece], positions: Positions, differences: Bits) -> Iterator[Change]:
    """Of each piece, whose positions grow."""
    begin = 0
    for piece in pieces:
        end = begin + piece.said.num_changed
        yield positions[begin:end], differences[begin:end]
        begin = end


def _add(tensor: Bits, changes: Sequence[Change]) -> None:
    """A position may come more than once, and sums do not mind; twice as fast as reading and writing.

    Scattered elements are waited for one by one, each in a line of the cache of its own. Where many of a window change,
    it is first read in order, which memory does three times as fast.
    """
    begin = min(int(positions[0]) for positions, _ in changes)
    end = 1 + max(int(positions[-1]) for positions, _ in changes)
    if sum(len(positions) for positions, _ in changes) < _DENSE * (end - begin):
        for positions, differences in changes:
            np.add.at(tensor, positions, differences)
        return
    windows = range(begin, end, WINDOW)
    cuts = [np.searchsorted(positions, [*windows, end]).tolist() for positions, _ in changes]
    for number, window in enumerate(windows):
        tensor[window : window + WINDOW].max()
        for (positions, differences), cut in zip(changes, cuts, strict=True):
            within = slice(cut[number], cut[number + 1])
            np.add.at(tensor, positions[within], differences[within])


def _batches(column: Sequence[Piece], *, most: int) -> Iterator[list[Piece]]:
    """A RAW piece by itself; SPARSE ones together, of not many more than `most` changed elements."""
    batch: list[Piece] = []
    num_changed = 0
    for piece in column:
        raw = piece.said.coding is Coding.RAW
        if batch and (raw or num_changed >= most):
            yield batch
            batch, num_changed = [], 0
        if raw:
            yield [piece]
        else:
            batch.append(piece)
            num_changed += piece.said.num_changed
    if batch:
        yield batch


def _payload(piece: Piece, blobs: Mapping[str, bytes]) -> memoryview:
    return memoryview(blobs[piece.blob_name])[piece.place]


def _sparse(piece: Piece, blobs: Mapping[str, bytes]) -> Sparse:
    said = piece.said
    return Sparse(
        data=_payload(piece, blobs),
        num_changed=said.num_changed,
        start=said.start,
        length=said.length,
    )
