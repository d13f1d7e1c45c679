"""Watches the streams all the time, on its own connection, and keeps every entry that was ever there.

    start an era: read the streams from their first entry ─► wait for new ones ─► connection lost ─► next era

If a server is rolled back to an older copy, or emptied, only what is there again is seen again: an entry is kept once,
with all eras in which it was seen. Each is written to a file at once, for later analysis. A thread of its own blocks on
Redis; it writes nothing there.
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
    name: str  # of its contents: two entries may have the same
    at: float
    eras: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """Numbers from the entries' fields alone, without decoding their messages."""

    tickets: frozenset[int] = frozenset()
    groups: tuple[tuple[str, int], ...] = ()  # entry id, ticket

    def open_tickets(self, cursor: str, carry: Collection[str]) -> frozenset[int]:
        """Return tickets asked for, or answered by a group that has not been read permanently."""
        return self.tickets | {number for at, number in self.groups if at in carry or _order(at) > _order(cursor)}


@dataclass(slots=True, kw_only=True)
class Record:
    """What was seen so far."""

    seen: dict[tuple[str, str, str], Seen] = field(default_factory=dict)  # by stream, id and name
    steps: dict[int, int] = field(default_factory=dict)  # optimizer step of each announced version
    eras: list[str] = field(default_factory=list)  # why each began
    final: Final | None = None  # what was there after everything had stopped; None: not read yet

    def of(self, kind: str) -> list[Seen]:
        return [one for one in list(self.seen.values()) if one.kind == kind]  # a copy: more may come meanwhile

    @property
    def newest_version(self) -> int:
        return max(self.steps, default=0)


class Recorder:
    def __init__(self, connect: Callable[[], redis.Redis], run: str, *, to: Path) -> None:
        """`connect` returns a client whose replies may take longer than a second."""
        self._connect, self._to = connect, to
        self._prefix = f"streamrl:{{{run}}}:"
        self._keys = {f"{self._prefix}{kind}:train": kind for kind in (TICKETS, GROUPS)}
        self.record = Record()
        self._stop = threading.Event()
        self._why = "begin"
        self._num_empty = 0  # reads without a result
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, what: str) -> None:
        """Note something done to Redis; an era that starts now is attributed to it."""
        self._why = what

    def catch_up(self, timeout_s: float = 5.0) -> bool:
        """Return whether everything that is there now was seen; a server that does not answer shows nothing."""
        enough = self._num_empty + 2  # the first may have started before this call
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
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self._error = error

    def _era(self, client: redis.Redis, file: Any) -> None:
        """Read until the connection is lost, or another server answers."""
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
        """Read the step, which is stored separately: the first of two versions in quick succession may be missed."""
        latest, step = client.hmget(f"{self._prefix}weights", "latest", "step")
        if latest is not None and step is not None:
            self.record.steps.setdefault(int(latest), int(step))


def look(client: redis.Redis, run: str, run_uid: str) -> Final:
    """Read tickets first: a delivery moves one from there to the groups, and never back."""
    found: dict[str, list[tuple[str, int]]] = {}
    for kind in (TICKETS, GROUPS):
        entries: Any = client.xrange(f"streamrl:{{{run}}}:{kind}:train")
        ours = [(at.decode(), fields[b"n"]) for at, fields in entries if fields.get(b"u") == run_uid.encode()]
        found[kind] = [(at, int(number)) for at, number in ours if number.isdigit()]
    return Final(tickets=frozenset(number for _, number in found[TICKETS]), groups=tuple(found[GROUPS]))


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)
