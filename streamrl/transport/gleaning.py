"""What monitors make of replies from Redis: what is not as it should be is noted, and hides nothing else.

Any program with the rights may have written there, of another version, or not ours at all. What learners and workers
act on is checked by them, and strictly. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from streamrl.telemetry.progress import Report
from streamrl.transport.report_codec import LARGEST, decode_reports
from streamrl.transport.types import Event, Record, RunInfo

_SHOWN = 40  # characters of a value that cannot be read
_LARGEST_INTEGER = 1 << 63

T = TypeVar("T")
Fields = Mapping[bytes, bytes]
Entries = Sequence[tuple[bytes, Fields]]


class Gleaner:
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
        self.integer("meta", meta, "epoch")  # to be noted where it is none
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
            epoch=_to_int(fields[b"epoch"]),
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
            epoch=_to_int(fields[b"epoch"]),
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
