"""Who looks at the streams all the time, by a connection of its own, and keeps every entry that ever lies there.

    begin an era: read the streams from their first entry ─► wait for the next ones ─► connection lost ─► next era

Of a server that was put back to an older copy, or was emptied, only what lies there again is seen again: an entry is
kept once, with all eras in which it was met. Each goes to a file at once, for whoever looks into it later. A thread of
its own blocks on Redis; nothing is written there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import redis

from tests.faults.judge.layout import Fields, name_of

TICKETS, GROUPS = "tickets", "groups"
_BLOCK_MS = 200
_PAUSE_S = 0.02
_AT_ONCE = 200  # entries


@dataclass(slots=True, kw_only=True)
class Seen:
    """One entry."""

    kind: str  # of its stream
    id: str
    fields: Fields
    name: str  # of what it says: two entries may say the same
    at: float
    eras: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """By their entries alone: whoever answers a ticket finds out whether it can be read."""

    tickets: frozenset[int] = frozenset()
    groups: tuple[tuple[str, int], ...] = ()  # entry id, ticket

    def open_tickets(self, cursor: str, carry: Collection[str]) -> frozenset[int]:
        """Asked for, or answered by a group that is not read for good."""
        return self.tickets | {number for at, number in self.groups if at in carry or _order(at) > _order(cursor)}


@dataclass(slots=True, kw_only=True)
class Record:
    """What was seen so far."""

    seen: dict[tuple[str, str, str], Seen] = field(default_factory=dict)  # by stream, id and name
    steps: dict[int, int] = field(default_factory=dict)  # optimizer step of each version that was announced
    eras: list[str] = field(default_factory=list)  # why each began
    final: Final | None = None  # what lay there when all had come to rest; None: nobody has looked

    def of(self, kind: str) -> list[Seen]:
        return [one for one in list(self.seen.values()) if one.kind == kind]  # more may come meanwhile

    @property
    def newest_version(self) -> int:
        return max(self.steps, default=0)


class Recorder:
    def __init__(self, connect: Callable[[], redis.Redis], run: str, *, to: Path) -> None:
        """`connect` gives a client whose replies may take longer than a second."""
        self._connect, self._to = connect, to
        self._prefix = f"streamrl:{{{run}}}:"
        self._keys = {f"{self._prefix}{kind}:train": kind for kind in (TICKETS, GROUPS)}
        self.record = Record()
        self._stop = threading.Event()
        self._why = "begin"
        self._num_empty = 0  # reads that found nothing
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, what: str) -> None:
        """Something that is done to Redis; an era that begins now begins for it."""
        self._why = what

    def catch_up(self, timeout_s: float = 5.0) -> bool:
        """Whether all that lies there now was seen; of a server that does not answer nothing can be."""
        enough = self._num_empty + 2  # the first one may have begun before
        ends = time.monotonic() + timeout_s
        while self._num_empty < enough and time.monotonic() < ends:
            self._stop.wait(_PAUSE_S)
        return self._num_empty >= enough

    def stop(self) -> Record:
        self._stop.set()
        self._thread.join(30.0)
        if self._error is not None:
            raise self._error
        assert not self._thread.is_alive(), "the recorder has not ended in 30 s"
        return self.record

    def _live(self) -> None:
        try:
            with self._to.open("ab") as file:
                while not self._stop.is_set():
                    try:
                        with self._connect() as client:
                            self._era(client, file)
                    except redis.RedisError:
                        self._stop.wait(_PAUSE_S)
        except BaseException as error:  # noqa: BLE001 - who stops it gets it
            self._error = error

    def _era(self, client: redis.Redis, file: Any) -> None:
        """Until the connection is lost, or another server answers."""
        client.ping()
        self.record.eras.append(self._why)
        self._why = "connection lost"
        after: dict[Any, Any] = dict.fromkeys([*self._keys, f"{self._prefix}announced"], "0-0")
        while not self._stop.is_set():
            reply: Any = client.xread(after, count=_AT_ONCE, block=_BLOCK_MS)
            self._num_empty += not reply
            for key, entries in reply:
                stream = key.decode()
                for entry_id, fields in entries:
                    after[stream] = entry_id.decode()
                    if stream in self._keys:
                        self._keep(self._keys[stream], entry_id.decode(), fields, file)
                    else:
                        self._note_version(client)
            file.flush()

    def _keep(self, kind: str, entry_id: str, fields: Fields, file: Any) -> None:
        era, name = len(self.record.eras) - 1, name_of(fields)
        known = self.record.seen.get((kind, entry_id, name))
        if known is not None:
            known.eras.append(era)
            return
        seen = Seen(kind=kind, id=entry_id, fields=fields, name=name, at=time.time(), eras=[era])
        self.record.seen[kind, entry_id, name] = seen
        file.write(msgpack.packb([kind, entry_id, era, seen.at, dict(fields)]))

    def _note_version(self, client: redis.Redis) -> None:
        """Its step lies beside it. Of two that come close upon each other the first one may be missed."""
        latest, step = client.hmget(f"{self._prefix}weights", "latest", "step")
        if latest is not None and step is not None:
            self.record.steps.setdefault(int(latest), int(step))


def look(client: redis.Redis, run: str, run_uid: str) -> Final:
    """Tickets first: a delivery moves one from there to the groups, and never back."""
    found: dict[str, list[tuple[str, int]]] = {}
    for kind in (TICKETS, GROUPS):
        entries: Any = client.xrange(f"streamrl:{{{run}}}:{kind}:train")
        ours = [(at.decode(), fields[b"n"]) for at, fields in entries if fields.get(b"u") == run_uid.encode()]
        found[kind] = [(at, int(number)) for at, number in ours if number.isdigit()]
    return Final(tickets=frozenset(number for _, number in found[TICKETS]), groups=tuple(found[GROUPS]))


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)
