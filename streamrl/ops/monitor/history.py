"""The curves of a run: read from Redis, once in full and then only what is new (`transport.keys`), or from the run's
folder.

Steps repeated after a crash count as the later term made them; what the earlier term made beyond is dropped. Blocks on
the caller's Redis client.

A month of training leaves hundreds of megabytes in the folder, and takes gigabytes as records: whoever needs a few
metrics, or only the end, reads no more.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import redis

from streamrl.errors import TransportError
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.keys import LONGEST_RECENT, NUM_LEVELS, Keys, is_validation
from streamrl.protocol.transport.snapshot import to_records
from streamrl.protocol.transport.types import START, Record, entry_order

T = TypeVar("T")

METRICS = "metrics.jsonl"  # file in the run's folder
HELD_OUT = "val_rollouts/rewards"
_RANKS = "val_rollouts/ranks"
_MAX_NEW_RECORDS = 500
_POINTS = 400  # more than a phone or a terminal has columns
_EVERY_RECORD = 1_000_000  # a folder's records are all kept
_END_BYTES = 1_000_000  # over a hundred lines


class Curve:
    """Records of one kind in the order of their steps, of a single lineage."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        """Add a record; call in the order in which they were written."""
        place = bisect_left(self.records, record.step, key=attrgetter("step"))
        later = self.records[place] if place < len(self.records) else None
        if later is not None and later.term > record.term:
            return  # from a learner that had been replaced
        # A later record of the same term was read from another stream, and stays.
        if later is not None and later.term < record.term:
            del self.records[place:]
        elif later is not None and later.step == record.step:
            del self.records[place]
        self.records.insert(place, record)


class History:
    """Curves of training and validation. Beyond `longest` records, every other one of the older half is dropped."""

    def __init__(self, *, longest: int = 12_000) -> None:
        self._longest = longest
        self._reset()

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Build from records in the order in which they were written."""
        history = cls(longest=_EVERY_RECORD)
        for record in records:
            history.add(record)
        return history

    @classmethod
    def read(cls, folder: Path, *, of_steps: Collection[str] | None = None) -> History:
        """Read the metrics.jsonl of a run's folder; of its steps only these metrics."""
        records = map(to_record, read_lines(folder / METRICS))
        return cls.of(records if of_steps is None else (_only(record, of_steps) for record in records))

    @classmethod
    def read_end(cls, folder: Path) -> History:
        """Read only the last records of the file, which is quick however long the run was."""
        return cls.of(map(to_record, read_lines(folder / METRICS, last_bytes=_END_BYTES)))

    @classmethod
    def of_recent(cls, records: Iterable[Record], client: redis.Redis, keys: Keys) -> History:
        """Build from the last records, which the caller has read, and all validations that Redis keeps. TransportError
        if it does not answer."""
        entries: Any = _answer(client, lambda: client.xrange(keys.validations)) or []
        return cls.of(_in_order([*to_records(entries), *records]))

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of the records with this metric, from training or validation."""
        curve = self.validations if is_validation([metric]) else self.steps
        having = [record for record in curve.records if metric in record.values]
        return [record.step for record in having], [record.values[metric] for record in having]

    def ranked(self, metric: str) -> list[float]:
        """Return its values in the validations that rank checkpoints. A validation that does not, lacks many answers,
        usually the long ones; its means are of an easier set."""
        having = (record.values for record in self.validations.records if metric in record.values)
        return [values[metric] for values in having if values.get(_RANKS, 1.0)]

    def _reset(self) -> None:
        self.steps, self.validations = Curve(), Curve()
        self._last_id: str | None = None  # of the recent stream; None: nothing read yet

    def refresh(self, client: redis.Redis, keys: Keys) -> bool:
        """Read what is new, and return whether there was anything. TransportError if Redis does not answer."""
        read = self._read_all if self._last_id is None else self._read_new
        records = _answer(client, lambda: read(client, keys)) or []
        for record in records:
            self.add(record)
        return bool(records)

    def _read_new(self, client: redis.Redis, keys: Keys) -> list[Record]:
        entries: Any = client.xrange(keys.metrics, min=f"({self._last_id}", count=_MAX_NEW_RECORDS)
        if not entries and self._restarted(client, keys):
            self._reset()
            return self._read_all(client, keys)
        if entries:
            self._last_id = entries[-1][0].decode()
        return to_records(entries)

    def _read_all(self, client: redis.Redis, keys: Keys) -> list[Record]:
        older = [keys.validations, *(keys.thinned(level) for level in range(NUM_LEVELS, 0, -1))]
        with client.pipeline(transaction=False) as pipe:
            for stream in older:
                pipe.xrange(stream)
            pipe.xrevrange(keys.metrics, count=LONGEST_RECENT + 500)
            *thinned, recent = pipe.execute()
        self._last_id = recent[0][0].decode() if recent else START
        return _in_order(record for page in (*thinned, recent[::-1]) for record in to_records(page))

    def _restarted(self, client: redis.Redis, keys: Keys) -> bool:
        """Return whether the stream ends before what was read: Redis lost it, or the run was started over."""
        newest: Any = client.xrevrange(keys.metrics, count=1)
        last = newest[0][0].decode() if newest else START
        return entry_order(last) < entry_order(self._last_id or START)

    def add(self, record: Record) -> None:
        curve = self.validations if is_validation(record.values) else self.steps
        curve.add(record)
        if len(curve.records) > self._longest:
            del curve.records[1 : len(curve.records) // 2 : 2]


def _answer(client: redis.Redis, ask: Callable[[], T]) -> T | None:
    """Return what Redis answers; None for a key of another type, which a snapshot notes."""
    try:
        return ask()
    except redis.RedisError as error:
        if isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error):
            return None
        raise TransportError(f"Redis at {server_name(client)} did not return the metrics: {error}") from error


def _in_order(records: Iterable[Record]) -> list[Record]:
    """Return records of several streams in the order in which they were written, each once."""
    found = {(record.term, record.step, is_validation(record.values)): record for record in records}
    return sorted(found.values(), key=lambda record: (record.term, record.step))


def to_record(line: dict[str, Any]) -> Record:
    """Convert a line of metrics.jsonl."""
    return Record(id=START, step=line.pop("step"), term=line.pop("term"), at=line.pop("at"), values=line)


def _only(record: Record, of_steps: Collection[str]) -> Record:
    if is_validation(record.values):
        return record
    return replace(record, values={name: record.values[name] for name in of_steps if name in record.values})


def read_lines(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Read JSON lines, of the whole file or in its last bytes; a crash may have truncated some, even inside a
    character."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if last_bytes is not None and (skipped := path.stat().st_size - last_bytes) > 0:
            file.seek(skipped)
            file.readline()  # the rest of a line
        yield from parse_lines(file)


def parse_lines(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def thin(values: Sequence[T]) -> Sequence[T]:
    """Return evenly spaced values for display, the first and the last included."""
    if len(values) <= _POINTS:
        return values
    last = len(values) - 1
    return [values[round(place * last / (_POINTS - 1))] for place in range(_POINTS)]
