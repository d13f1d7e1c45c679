"""Patches tensors with deltas; `sparse` has the coding of one range. Blocks on nothing.

Tensors are patched by stretches, each with all of its deltas at once, in parallel:

    columns ─► thread: decode a column's deltas together ─► add them to the tensor ─► next column
              thread: ...

Columns share no element, so threads need no synchronization. A single delta is patched by one thread, because the
worker generates meanwhile; a worker far behind generates nothing useful, so it uses the cores there are.

Memory is read once, instead of once per delta:

    delta 6.51   | a  | b  | c  |          column 1: a of 6.51, a of 6.52, ...      fits the cache
    delta 6.52   | a  | b  | c  |    ─►    column 2: b of 6.51, b of 6.52, ...
    ...

Deltas may be cut differently (by another number of ranks): a column ends where all of them have a cut.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import zstandard

from streamrl.protocol.weights.changes import ChangeLog
from streamrl.protocol.weights.format import Bits, Coding
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.sparse import Codec, CodedRange, InPasses, expand

T = TypeVar("T")

_MOST_THREADS = 4  # enough to saturate the memory bandwidth
_AT_ONCE = 1 << 16  # changed elements: their decoded form stays in the cache


def threads_for(num_versions: int) -> int:
    return 1 if num_versions == 1 else min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def side_by_side(work: Callable[[T], None], items: Iterable[T], *, num_threads: int) -> None:
    """Run `work` on all items; raise the first error once the work in progress has ended."""
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
    codec: Codec | None = None,  # None: numpy
    changes: ChangeLog | None = None,  # records the positions
) -> set[str]:
    """Apply deltas, each on the one before, and return the names of the tensors that they changed.

    `blobs` holds all of their blobs. WeightsError: a delta does not decode, and the tensors' contents are undefined.
    """
    noting = ChangeLog() if changes is None else changes
    noting.going_on()
    adding = InPasses() if codec is None else codec
    stretches = list(columns(manifests, blobs))
    side_by_side(lambda column: _patch_column(tensors, column, adding, noting), stretches, num_threads=num_threads)
    return {column[0].record.tensor for column in stretches}


def _patch_column(tensors: Mapping[str, Bits], column: Sequence[CodedRange], codec: Codec, changes: ChangeLog) -> None:
    first = column[0].record
    tensor = tensors[first.tensor]
    decompressor = zstandard.ZstdDecompressor()  # one per thread: it is not thread-safe, and cheap to create
    for ranges in batches(column, alone=_is_raw, size=lambda coded: coded.record.num_changed, at_most=_AT_ONCE):
        record = ranges[0].record
        if _is_raw(ranges[0]):
            tensor[record.start : record.start + record.length] = np.frombuffer(ranges[0].data, tensor.dtype)
            changes.note_whole(record.tensor)
        else:
            plains = [expand(coded, dtype=tensor.dtype, decompressor=decompressor) for coded in ranges]
            positions = codec.add(ranges, plains, tensor)
            changes.note(record.tensor, positions, start=first.start, num_elements=len(tensor))


def batches(
    items: Iterable[T], *, alone: Callable[[T], bool], size: Callable[[T], int], at_most: int
) -> Iterator[list[T]]:
    """Batch the items in order: an `alone` item by itself, others up to `at_most` in sum (a larger one by itself)."""
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


def _is_raw(coded: CodedRange) -> bool:
    return coded.record.coding is Coding.RAW


def columns(manifests: Sequence[Manifest], blobs: Mapping[str, bytes]) -> Iterator[list[CodedRange]]:
    """Yield the ranges of each stretch in the order of the manifests, which are deltas, each on the one before."""
    ranges: dict[str, list[CodedRange]] = defaultdict(list)
    starts: dict[str, set[int]] = {}  # cuts that all manifests so far share
    for manifest in manifests:
        own: dict[str, set[int]] = defaultdict(set)
        for shard in manifest.shards:
            blob = memoryview(blobs[shard.blob_name])
            for record, place in shard.placed_ranges():
                if record.coding in (Coding.PRETRAINED, Coding.MERGED):
                    continue
                own[record.tensor].add(record.start)
                if record.coding is not Coding.SAME:
                    ranges[record.tensor].append(CodedRange(record=record, data=blob[place]))
        starts = {tensor: cuts & starts.get(tensor, cuts) for tensor, cuts in own.items()}
    for tensor, changed in ranges.items():
        cuts, stretches = sorted(starts[tensor]), defaultdict[int, list[CodedRange]](list)
        for coded in changed:
            stretches[bisect_right(cuts, coded.record.start)].append(coded)
        yield from stretches.values()
