"""Fetches a blob in pieces from many places: this host asks Redis who has which, fetches them, and serves its own.

    report to Redis what we have ─► who has what ──► up to NUM_FROM_PEERS pieces at a time from peers, rarest first
             ▲                 └──► pieces assigned to us ─► NUM_FROM_STORE at a time from the store
             └── repeated, less often the more hosts there are

Each piece leaves the store about once: one host is assigned to fetch it, and the others get it from there. Peers are
best effort. If none has provided anything for `_ALONE_AFTER_S`, pieces that nobody is fetching come from the store;
after `_DESPERATE_AFTER_S` any piece does, in random order, so that hosts in the same situation fetch different ones.
Every piece is checked against the manifest before it is put. Blocks on the store and on peers, each within its own
bounds; errors of the store propagate.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from streamrl.crashpoints import crashpoint
from streamrl.errors import TransportError, WeightsError
from streamrl.protocol.transport.peers import CLAIM_S, Peers, PeersReply, bitmap_of
from streamrl.protocol.weights.stores import BlobStore
from streamrl.workers.sharing.host import SharedBlob
from streamrl.workers.sharing.neighbours import Neighbour, Neighbours
from streamrl.workers.sharing.reading import Counts

if TYPE_CHECKING:
    from streamrl.workers.sharing.door import Door

log = structlog.get_logger(__name__)

NUM_FROM_PEERS = 4
NUM_FROM_STORE = 2  # keeps the store's link busy
_NUM_ASSIGNED = 4  # pieces that we accept at a time
_MIN_REPORT_S = 0.05
_REPORT_S_PER_PEER = 0.001  # limits Redis to a thousand reports a second, however many hosts there are
_TICK_S = 0.01
_ALONE_AFTER_S = 1.0
_DESPERATE_AFTER_S = 2 * CLAIM_S
_NUM_TRIES = 2  # per piece from the store: a bit flip in transit does not repeat


class Swarm:
    """One per worker."""

    def __init__(self, peers: Peers, door: Door, neighbours: Neighbours) -> None:
        self.peers, self.door, self.neighbours = peers, door, neighbours

    def fill(self, shared: SharedBlob, store: BlobStore, counts: Counts) -> None:
        """Put every missing piece."""
        self.door.offer(shared.record)
        try:
            with _pool(NUM_FROM_PEERS) as from_peers, _pool(NUM_FROM_STORE) as from_store:
                _Filling(self, shared, store, counts, from_peers, from_store).run()
        finally:
            self.neighbours.forget(shared.record)


@contextmanager
def _pool(size: int) -> Iterator[ThreadPoolExecutor]:
    """Exit at once even if a peer still holds a thread, which ends within that peer's bounds."""
    pool = ThreadPoolExecutor(max_workers=size, thread_name_prefix="pieces")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


Piece = bytes | bytearray | None


class _Filling:
    """The fetch of one blob."""

    def __init__(
        self,
        swarm: Swarm,
        shared: SharedBlob,
        store: BlobStore,
        counts: Counts,
        from_peers: ThreadPoolExecutor,
        from_store: ThreadPoolExecutor,
    ) -> None:
        self._swarm, self._shared, self._store, self._counts = swarm, shared, store, counts
        self._from_peers, self._from_store = from_peers, from_store
        self._record = shared.record
        self._missing = set(shared.missing())
        self._assigned: deque[int] = deque()
        self._taken: set[int] = set()  # assigned to us, and not yet reported as here
        self._in_flight: dict[Future[Piece], int] = {}
        self._of_store: set[Future[Piece]] = set()  # those of `_in_flight` that go to the store
        self._store_rests_until = 0.0
        self._report_at = 0.0
        self._busy: Collection[int] = ()  # pieces that others fetch from the store
        self._helped_at = time.monotonic()  # when a peer last provided something

    def run(self) -> None:
        while self._missing:
            if time.monotonic() >= self._report_at:
                self._report()
            self._ask_store()
            self._ask_peers()
            done, _ = wait(self._in_flight, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            if not self._in_flight:
                time.sleep(_TICK_S * random.uniform(0.5, 1.0))
            for future in done:
                self._take_in(future, self._in_flight.pop(future))
        self._report(most=0)  # so that others find the whole blob here

    def _take_in(self, future: Future[Piece], piece: int) -> None:
        is_of_store = future in self._of_store
        self._of_store.discard(future)
        try:
            data = future.result()
        except TransportError:
            if not self._in_flight:  # no peer can help either
                raise
            self._store_rests_until = time.monotonic() + _ALONE_AFTER_S
            return
        if data is None:
            return
        if is_of_store:
            self._counts.add(store=len(data))
        else:
            self._counts.add(peers=len(data))
            self._helped_at = time.monotonic()
        if piece in self._missing:
            self._shared.put(piece, data)
            self._missing.discard(piece)

    def _ask_store(self) -> None:
        while len(self._of_store) < NUM_FROM_STORE and time.monotonic() >= self._store_rests_until:
            piece = self._next_of_store()
            if piece is None:
                return
            future = self._from_store.submit(self._from_the_store, piece)
            self._of_store.add(future)
            self._in_flight[future] = piece

    def _next_of_store(self) -> int | None:
        wanted = self._missing - set(self._in_flight.values())
        while self._assigned and self._assigned[0] not in wanted:
            self._assigned.popleft()
        if self._assigned:
            return self._assigned.popleft()
        overdue = self._overdue()
        # If nothing else is left, fetch a second copy of what a peer is sending, but never a third.
        candidates = overdue & wanted or (overdue if not self._of_store else None)
        return random.choice(sorted(candidates)) if candidates else None

    def _overdue(self) -> frozenset[int]:
        alone_s = time.monotonic() - self._helped_at
        if alone_s > _DESPERATE_AFTER_S:
            return frozenset(self._missing)
        return frozenset(self._missing.difference(self._busy) if alone_s > _ALONE_AFTER_S else ())

    def _from_the_store(self, piece: int) -> Piece:
        record = self._record
        for _ in range(_NUM_TRIES):
            data = self._store.part(record.blob_name, record.piece(piece))
            if record.is_piece(piece, data):
                return data
        raise WeightsError(f"piece {piece} of blob {record.blob_name} in the store does not agree with its digest")

    def _ask_peers(self) -> None:
        while len(self._in_flight) - len(self._of_store) < NUM_FROM_PEERS:
            wanted = self._missing - set(self._in_flight.values())
            chosen = self._swarm.neighbours.choose(self._record, wanted - set(self._assigned) or wanted)
            if chosen is None:
                return
            piece, neighbour = chosen
            self._in_flight[self._from_peers.submit(self._from_a_peer, neighbour, piece)] = piece

    def _from_a_peer(self, neighbour: Neighbour, piece: int) -> Piece:
        return self._swarm.neighbours.ask(neighbour, self._record, piece)

    def _report(self, *, most: int | None = None) -> None:
        reply = self._exchange(_NUM_ASSIGNED - len(self._assigned) if most is None else most)
        if reply is None:
            self._report_at = time.monotonic() + _ALONE_AFTER_S
            return
        pause_s = max(_MIN_REPORT_S, _REPORT_S_PER_PEER * reply.num_peers)
        self._report_at = time.monotonic() + pause_s * random.uniform(0.75, 1.25)
        self._swarm.door.secret = self._swarm.neighbours.secret = reply.secret
        self._swarm.neighbours.update(self._record, reply.peers)
        self._busy = reply.busy
        self._assigned += [piece for piece in reply.assigned if piece not in self._assigned]
        self._taken |= {*reply.assigned}

    def _exchange(self, most: int) -> PeersReply | None:
        record = self._record
        have = [piece for piece in range(record.num_pieces) if piece not in self._missing]
        try:
            reply = self._swarm.peers.exchange(
                record.digest.hex(),
                have=bitmap_of(have, record.num_pieces),
                num_pieces=record.num_pieces,
                taken=self._taken,
                most=most,
            )
        except TransportError as error:
            log.warning("peers_not_reported", why=str(error))
            return None
        crashpoint("share.told")
        self._taken.intersection_update(self._missing)
        return reply
