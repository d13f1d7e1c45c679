"""The peers that this worker knows: which has what, which is being asked, which is backing off, and which lied.

One request at a time goes to each peer. A peer that is slow, gone or full rests, longer each time. A peer whose bytes
do not match the manifest has lied, and this process never asks it again. An answer is read up to its expected length
and no further, within `PIECE_S`. Blocks for as long. Of the idle connections only those used last are kept: a peer that
has left is never asked again, and its connection would stay for ever.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamrl.errors import TransportError
from streamrl.process import parse_address
from streamrl.protocol.transport.peers import HAVE, address_of_peer, pieces_of, token
from streamrl.protocol.weights.manifest import ShardRecord
from streamrl.workers.sharing.asking import Answer, Connection, WrongLength

PIECE_S = 10.0
_FIRST_REST_S, _LONGEST_REST_S, _FULL_REST_S = 0.5, 60.0, 0.1
_MAX_CHOSEN_FROM = 16
_MAX_KNOWN = 1024  # peers remembered
MAX_IDLE = 32  # connections


@dataclass(slots=True, eq=False)
class Neighbour:
    address: str
    place: tuple[str, int]
    have: dict[str, set[int]] = field(default_factory=dict)  # by blob, as last reported
    rest_s: float = _FIRST_REST_S
    rests_until: float = 0.0
    is_asked: bool = False
    is_liar: bool = False
    connection: Connection | None = None

    def may_be_asked(self) -> bool:
        return not self.is_asked and not self.is_liar and time.monotonic() >= self.rests_until

    def rest(self) -> None:
        self.rests_until = time.monotonic() + self.rest_s * random.uniform(0.5, 1.0)
        self.rest_s = min(2 * self.rest_s, _LONGEST_REST_S)


class Neighbours:
    """One per worker; used from several threads."""

    def __init__(self, *, run_uid: str, own: str, on_lie: Callable[[str], None] = lambda address: None) -> None:
        self.secret = b""
        self._run_uid, self._own, self._on_lie = run_uid, own, on_lie
        self._known: dict[str, Neighbour] = {}  # met or asked longest ago first
        self._lock = threading.Lock()

    def update(self, record: ShardRecord, bitmaps: Mapping[str, bytes]) -> None:
        """Record which peers have which pieces, as Redis reports it; invalid addresses are left out."""
        digest = record.digest.hex()
        with self._lock:
            for address, bitmap in bitmaps.items():
                neighbour = self._known.get(address) or self._meet(address)
                if neighbour is not None:
                    neighbour.have.setdefault(digest, set()).update(pieces_of(bitmap, record.num_pieces))

    def forget(self, record: ShardRecord) -> None:
        """Forget who has pieces of this blob, which is complete here or given up."""
        with self._lock:
            for neighbour in self._known.values():
                neighbour.have.pop(record.digest.hex(), None)

    def choose(self, record: ShardRecord, missing: Iterable[int]) -> tuple[int, Neighbour] | None:
        """Choose a missing piece, rarest first among those of available peers, and a random one of the peers that have
        it. The peer counts as busy until `ask` returns."""
        digest = record.digest.hex()
        with self._lock:
            free = [
                neighbour for neighbour in self._known.values() if digest in neighbour.have and neighbour.may_be_asked()
            ]
            free = random.sample(free, min(len(free), _MAX_CHOSEN_FROM))
            holders = {
                piece: [neighbour for neighbour in free if piece in neighbour.have.get(digest, ())] for piece in missing
            }
            fewest = min((len(peers) for peers in holders.values() if peers), default=0)
            rarest = [piece for piece, peers in holders.items() if peers and len(peers) == fewest]
            if not rarest:
                return None
            piece = random.choice(rarest)
            chosen = random.choice(holders[piece])
            chosen.is_asked = True
            self._known[chosen.address] = self._known.pop(chosen.address)
            self._close_idle()
        return piece, chosen

    def ask(self, neighbour: Neighbour, record: ShardRecord, number: int) -> bytearray | None:
        """Fetch the piece and verify it. None: that peer does not have it, or not now."""
        place = record.piece(number)
        try:
            data = self._fetch(neighbour, record, number, place.stop - place.start)
            if data is not None and not record.is_piece(number, data):
                raise WrongLength
        except WrongLength:
            neighbour.is_liar = True
            self._on_lie(neighbour.address)
            _disconnect(neighbour)
            return None
        except (OSError, TransportError, ValueError):
            _disconnect(neighbour)
            neighbour.rest()
            return None
        finally:
            neighbour.is_asked = False
        if data is not None:
            neighbour.rest_s = _FIRST_REST_S
        return data

    def close(self) -> None:
        with self._lock:
            for neighbour in self._known.values():
                _disconnect(neighbour)

    def _close_idle(self) -> None:
        idle = [one for one in self._known.values() if one.connection is not None and not one.is_asked]
        for neighbour in idle[: max(0, len(idle) - MAX_IDLE)]:
            _disconnect(neighbour)

    def _meet(self, address: str) -> Neighbour | None:
        place = address_of_peer(address, own=self._own)
        if place is None:
            return None
        if len(self._known) >= _MAX_KNOWN:
            oldest = next(
                (neighbour for neighbour in self._known.values() if not neighbour.is_asked and not neighbour.is_liar),
                None,
            )
            if oldest is None:
                return None
            _disconnect(self._known.pop(oldest.address))
        neighbour = self._known[address] = Neighbour(address, place)
        return neighbour

    def _fetch(self, neighbour: Neighbour, record: ShardRecord, number: int, num_bytes: int) -> bytearray | None:
        digest = record.digest.hex()
        answer = self._request(neighbour, f"/pieces/{digest}/{number}", num_bytes)
        if HAVE in answer.headers and digest in neighbour.have:  # else the blob is complete by now
            neighbour.have[digest] = pieces_of(bytes.fromhex(answer.headers[HAVE]), record.num_pieces)
        if answer.status == 200:
            return answer.body
        neighbour.have.get(digest, set()).discard(number)
        if answer.status == 503:
            neighbour.rests_until = time.monotonic() + _FULL_REST_S * random.uniform(0.5, 1.0)
        elif answer.status != 404:
            raise TransportError(f"{neighbour.address} answered {answer.status}")
        return None

    def _request(self, neighbour: Neighbour, path: str, num_bytes: int) -> Answer:
        key = token(self.secret, self._run_uid, neighbour.address, path)
        own_host = parse_address(self._own, what="peer")[0]
        get = partial(
            _get, neighbour, own_host, path, token=key, num_bytes=num_bytes, deadline=time.monotonic() + PIECE_S
        )
        was_open = neighbour.connection is not None
        try:
            return get()
        except ConnectionError:
            _disconnect(neighbour)
            if not was_open:
                raise
            return get()  # the kept connection had been closed while idle


def _get(neighbour: Neighbour, own_host: str, path: str, **bounds: Any) -> Answer:
    if neighbour.connection is None:
        neighbour.connection = Connection(neighbour.place, own_host=own_host)
    return neighbour.connection.get(path, **bounds)


def _disconnect(neighbour: Neighbour) -> None:
    if neighbour.connection is not None:
        neighbour.connection.close()
        neighbour.connection = None
