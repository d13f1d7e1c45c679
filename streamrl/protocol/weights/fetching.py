"""Blobs are fetched ahead of whoever uses them, in the order in which they are wanted:

    wanted ─► up to NUM_THREADS at a time, so many bytes ahead ─► digest checked ─► used, one after another
          └─► by who will use it, where nothing is under way ───────────┘

So the latency of a store is paid about once and not for each of a hundred deltas, and memory stays bounded. Blocks on
the store, within the store's own bounds. A store must bear calls from several threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from streamrl.errors import WeightsError
from streamrl.protocol.weights.format import digest_of
from streamrl.protocol.weights.manifest import ShardRecord
from streamrl.protocol.weights.stores import Blobs

AHEAD_BYTES = 512 << 20
NUM_THREADS = 4
_FETCHES = 2  # a flip on the wire is gone with the second; one in the store is not


def fetch(shard: ShardRecord, store: Blobs) -> bytes:
    """A blob that agrees with its digest, or WeightsError; TransportError: not just now."""
    for _ in range(_FETCHES):
        blob = store.get(shard.blob_name)
        if len(blob) == shard.num_bytes and digest_of(blob) == shard.digest:
            return blob
    raise WeightsError(f"blob {shard.blob_name} does not agree with its digest, fetched {_FETCHES} times")


def fetch_ahead(
    shards: Iterable[ShardRecord], store: Blobs, *, ahead_bytes: int = AHEAD_BYTES
) -> Generator[tuple[ShardRecord, bytes]]:
    """Each with its blob; to be closed (`contextlib.closing`) by who may stop early."""
    left = deque(shards)
    pool = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="blobs")
    under_way: deque[tuple[ShardRecord, Future[bytes]]] = deque()
    asked_bytes = 0
    try:
        while left or under_way:
            if under_way:
                shard, coming = under_way.popleft()
            else:
                # Its user can only wait for it. An anchor of 272 MB came in 0.25 s this way, and in 0.4 to 1.1 s to a
                # thread of the pool, whose memory is new to it and comes page by page.
                shard, coming = left.popleft(), None
                asked_bytes += shard.num_bytes
            while left and asked_bytes + left[0].num_bytes <= ahead_bytes:
                asked_bytes += left[0].num_bytes
                under_way.append((left[0], pool.submit(fetch, left.popleft(), store)))
            yield shard, fetch(shard, store) if coming is None else coming.result()
            asked_bytes -= shard.num_bytes
    finally:
        pool.shutdown(cancel_futures=True)
