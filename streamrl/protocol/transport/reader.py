"""What monitors make of replies from Redis: what is not as it should be is noted, and hides nothing else.

Any program with the rights may have written there, of another version, or not ours at all. What learners and workers
act on is checked by them, and strictly. Pure.

Reading a stream in pages, one of them ahead: the server makes it ready while its reader looks at the one before.

    read ──► page ──► the reader is busy with it ──► read ──► page ──► ...
                └ the next one is asked for ──── it comes ────┘

What was asked for ahead is what a read at that moment would have given, and is handed out only to a reader who goes on
from where it stopped. Reading changes nothing, so any call may be repeated. Blocks at most `block_ms`, or until the
reply times out; errors come out as they are.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import redis

from streamrl.protocol.transport.report_codec import LARGEST, decode_reports
from streamrl.protocol.transport.types import Event, Record, RunInfo
from streamrl.telemetry.progress import Report

_SHOWN = 40  # characters of a value that cannot be read
_LARGEST_INTEGER = 1 << 63

T = TypeVar("T")
Fields = Mapping[bytes, bytes]
Entries = Sequence[tuple[bytes, Fields]]


class LenientReader:
    def __init__(self, unreadable: Iterable[str] = ()) -> None:
        self._unreadable = list(unreadable)

    @property
    def unreadable(self) -> tuple[str, ...]:
        return tuple(self._unreadable)

    def number(self, hash_name: str, fields: Fields, name: str) -> float | None:
        """None where it is not there either."""
        return self._read(hash_name, fields, name, _to_float)

    def integer(self, hash_name: str, fields: Fields, name: str) -> int | None:
        return self._read(hash_name, fields, name, _to_int)

    def _read(self, hash_name: str, fields: Fields, name: str, read: Callable[[bytes], T]) -> T | None:
        raw = fields.get(name.encode())
        try:
            return None if raw is None else read(raw)
        except ValueError:
            self._unreadable.append(f"{hash_name} {name} = {_text(raw or b'')[:_SHOWN]!r}")
            return None

    def run(self, name: str, meta: Fields) -> RunInfo | None:
        self.integer("meta", meta, "term")  # to be noted where it is none
        return RunInfo.from_hash(name, meta)

    def reports(self, progress: Fields) -> tuple[Report, ...]:
        reports = decode_reports(progress)
        self._note_missing("reports", len(progress) - len(reports), len(progress))
        return tuple(reports)

    def records(self, entries: Entries) -> tuple[Record, ...]:
        records = to_records(entries)
        self._note_missing("records of metrics", len(entries) - len(records), len(entries))
        return tuple(records)

    def events(self, entries: Entries) -> tuple[Event, ...]:
        events = [event for entry in entries if (event := _to_event(*entry)) is not None]
        self._note_missing("events", len(entries) - len(events), len(entries))
        return tuple(events)

    def _note_missing(self, what: str, num_missing: int, num_entries: int) -> None:
        if num_missing:
            self._unreadable.append(f"{num_missing} of {num_entries} {what}")


def to_records(entries: Iterable[tuple[bytes, Fields]]) -> list[Record]:
    """Those entries of a stream of metrics that can be read."""
    return [record for entry in entries if (record := _to_record(*entry)) is not None]


def _to_record(entry_id: bytes, fields: Fields) -> Record | None:
    try:
        return Record(
            id=entry_id.decode(),
            step=_to_int(fields[b"step"]),
            term=_to_int(fields[b"term"]),
            at=_to_float(fields[b"at"]),
            values=_numbers(_mapping(fields[b"values"])),
        )
    except (KeyError, ValueError, RecursionError):
        return None


def _to_event(entry_id: bytes, fields: Fields) -> Event | None:
    try:
        return Event(
            id=entry_id.decode(),
            kind=_text(fields[b"kind"]),
            term=_to_int(fields[b"term"]),
            at=_to_float(fields[b"at"]),
            detail=_mapping(fields[b"detail"]),
        )
    except (KeyError, ValueError, RecursionError):
        return None


def _mapping(raw: bytes) -> dict[str, Any]:
    found = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The learner leaves out what is none."""
    if not all(isinstance(value, int | float) for value in values.values()):
        raise ValueError("not numbers")
    return {name: _finite(value) for name, value in values.items()}


def _to_float(raw: bytes) -> float:
    return _finite(float(raw))


def _finite(number: float) -> float:
    if not abs(number) < LARGEST:
        raise ValueError("no number of ours is so large")
    return number


def _to_int(raw: bytes) -> int:
    if abs(number := int(raw)) >= _LARGEST_INTEGER:
        raise ValueError("no number of ours is so large")
    return number


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


class PagedReader:
    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        # None of the pool's: a reader that is left in the midst of a page would not give it back.
        pool = client.connection_pool
        self._connection = pool.connection_class(**pool.connection_kwargs)
        weakref.finalize(self, self._connection.disconnect)  # or the collector finds its socket open, and complains
        self._reached = ""  # id of the last entry handed out
        self._page: list[Any] = []  # what is behind it, and has come
        self._asked = False  # for the page behind that

    def read(self, *, after: str, count: int, block_ms: int | None) -> list[Any]:
        """Up to `count` entries behind this id, as the client gives them."""
        if after != self._reached:
            self.forget()
        if self._asked:
            self._page = self._collect()
        if not self._page:
            self._ask(after, count, *(() if block_ms is None else ("BLOCK", block_ms)))
            self._page = self._collect()
        handed_out, self._page = self._page[:count], self._page[count:]
        if handed_out:
            self._reached = handed_out[-1][0].decode()
        if len(handed_out) == count and not self._page:  # or else the reader is faster, and nothing lies there yet
            self._ask(self._reached, count)
        return handed_out

    def forget(self) -> None:
        """What was read ahead may be of another time, or of another server."""
        self._reached, self._page, self._asked = "", [], False
        self._connection.disconnect()

    def _ask(self, after: str, count: int, *block: str | int) -> None:
        self._connection.connect()  # a sentinel's finds the master in this alone
        self._connection.send_command("XREAD", "COUNT", count, *block, "STREAMS", self._stream, after)
        self._asked = True

    def _collect(self) -> list[Any]:
        self._asked = False
        reply: Any = self._client.parse_response(self._connection, "XREAD")  # type: ignore[no-untyped-call]
        return list(reply[0][1]) if reply else []
