"""A run at a glance: everything that monitors, the launcher's display and `--json` show, read in one round trip.

Only reads, with plain commands that a monitor's permissions allow. Any client with write access may have written the
data, in another version or by another program: an invalid value is noted, and does not hide the rest. Learners and
workers check strictly what they act on. Blocks some seconds at most while Redis is down, then raises TransportError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import redis

from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.transport.entries import LARGEST, decode_reports, one_of, to_run_info
from streamrl.protocol.transport.keys import HANDED_BACK, WORKERS, Keys
from streamrl.protocol.transport.types import CONTROLS, Control, Event, Record, RunInfo, entry_order
from streamrl.protocol.wire.ticket import PURPOSES, Purpose
from streamrl.telemetry.progress import Report

T = TypeVar("T")
Fields = Mapping[bytes, bytes]
Entries = Iterable[tuple[bytes, Fields]]

_PATIENCE_S = 5.0
_SHOWN = 40  # characters shown of an invalid value
_LARGEST_INTEGER = 1 << 63
_NUM_LETTERS = 5
_NUM_OLDEST = 20  # pending tickets searched for the oldest one that a worker holds
_PER_STREAM = 5  # replies
_ANOTHER_TYPE = "WRONGTYPE"
# Errors for a reader without permission, or before the key exists: they do not fail the whole snapshot.
_PASSED_OVER = ("NOGROUP", "NOPERM", "no such key", "unknown command", _ANOTHER_TYPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestLease:
    """Of the tickets that workers hold, the one issued first."""

    worker: str
    issued_s: float  # ago
    silent_s: float  # since its worker last renewed the lease
    times_leased: int  # more than once: workers died with it, or lost it; tickets handed back do not count


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounts:
    num_tickets: int  # not yet delivered, leased or not
    num_leased: int
    leased_by: Mapping[str, int]  # worker -> its leases
    num_groups: int  # delivered and not yet committed
    oldest_lease: OldestLease | None = None
    num_group_bytes: int = 0  # approximate memory of the groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    version: str = ""
    max_memory_policy: str = "noeviction"
    role: str = "master"
    save_error: str = ""  # the last save or append to disk failed: the server may refuse writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    at: float  # by the server's clock
    run: RunInfo | None  # None: there is no run of this name
    created_at: float | None
    step: int  # of the last commit
    holder: str | None  # the learner's; None: nobody holds the lease
    control: Control
    streams: Mapping[Purpose, StreamCounts]
    num_dead: int
    latest_version: int | None
    latest_version_step: int
    reports: tuple[Report, ...]
    records: tuple[Record, ...]  # the last ones, oldest first
    events: tuple[Event, ...]  # the last ones, oldest first
    used_memory_bytes: int
    max_memory_bytes: int  # 0: no limit is set
    latest_version_at: float | None = None
    lease_left_s: float | None = None
    was_removed: bool = False  # a tombstone is there
    num_versions_kept: int = 0
    num_versions_published: int | None = None  # since this Redis has had the run
    num_retry_requests: int = 0
    letters: tuple[Mapping[str, str], ...] = ()  # the newest dead letters, newest first: {ticket, error}
    server: Server = Server()
    reported: Mapping[str, float] = field(default_factory=dict)  # part -> when it last reported, by the server's clock
    unreadable: tuple[str, ...] = ()  # invalid values, which are left out above

    def age_s(self, report: Report) -> float:
        """Seconds since it was written; by its process's clock, which may be wrong, if the server has no time."""
        return max(0.0, self.at - self.reported.get(report.part, report.at))


def snapshot(
    client: redis.Redis, keys: Keys, *, num_records: int = 1, num_events: int = 20, give_up_after_s: float = _PATIENCE_S
) -> Snapshot:
    look = partial(_look, client, keys, num_records, num_events)
    replies, of_another_type = repeat(client, "read the run's state", look, give_up_after_s=give_up_after_s)
    seen = _Lenient(unreadable=[f"{key}: of another type" for key in of_another_type])
    (time, meta, weights, progress, holder, lease_ms, control, tombstone), replies = replies[:8], replies[8:]
    (num_dead, letters, num_requests, num_versions, records, events, info), replies = replies[:7], replies[7:]
    reported, *streams = replies
    at = time[0] + time[1] / 1e6
    seen.value(_to_int, "meta", meta, "term")  # only to note an invalid value
    return Snapshot(
        at=at,
        run=to_run_info(keys.name, meta),
        created_at=seen.value(_to_float, "meta", meta, "created_at"),
        step=seen.value(_to_int, "meta", meta, "step") or 0,
        holder=holder.decode(errors="replace") if holder else None,
        control=one_of(CONTROLS, control, "run"),
        streams={
            purpose: _to_counts(streams[_PER_STREAM * place :][:_PER_STREAM], at=at)
            for place, purpose in enumerate(PURPOSES)
        },
        num_dead=num_dead or 0,
        latest_version=seen.value(_to_int, "weights", weights, "latest"),
        latest_version_step=seen.value(_to_int, "weights", weights, "step") or 0,
        latest_version_at=seen.value(_to_float, "weights", weights, "at"),
        num_versions_published=seen.value(_to_int, "weights", weights, "published"),
        reports=seen.all_of("reports", progress, decode_reports(progress)),
        records=seen.all_of("records of metrics", records, to_records(reversed(records))),
        events=seen.all_of("events", events, _readable(reversed(events), _to_event)),
        used_memory_bytes=int(info.get("used_memory", 0)),
        max_memory_bytes=int(info.get("maxmemory", 0)),
        lease_left_s=lease_ms / 1000 if lease_ms and lease_ms > 0 else None,
        was_removed=bool(tombstone),
        num_versions_kept=num_versions or 0,
        num_retry_requests=num_requests or 0,
        letters=tuple(_to_letter(fields) for _, fields in letters),
        server=_to_server(info),
        reported={part.decode(errors="replace"): at for part, at in reported or () if abs(at) < LARGEST},
        unreadable=tuple(seen.unreadable),
    )


def _look(client: redis.Redis, keys: Keys, num_records: int, num_events: int) -> tuple[list[Any], list[str]]:
    """Read everything in one round trip, in the order in which `snapshot` unpacks it.

    Also returns the keys whose type is wrong.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(keys.meta)
        pipe.hgetall(keys.weights)
        pipe.hgetall(keys.progress)
        pipe.get(keys.lease)
        pipe.pttl(keys.lease)
        pipe.hget(keys.control, "mode")
        pipe.exists(keys.tombstone)
        pipe.xlen(keys.dead)
        pipe.xrevrange(keys.dead, count=_NUM_LETTERS)
        pipe.hlen(keys.retry_requests)
        pipe.hlen(keys.manifests)
        pipe.xrevrange(keys.metrics, count=num_records)
        pipe.xrevrange(keys.events, count=num_events)
        pipe.info()
        pipe.zrange(keys.reported, 0, -1, withscores=True)
        for purpose in PURPOSES:
            pipe.xlen(keys.tickets(purpose))
            pipe.xpending(keys.tickets(purpose), WORKERS)
            pipe.xpending_range(keys.tickets(purpose), WORKERS, "-", "+", _NUM_OLDEST)
            pipe.xlen(keys.groups(purpose))
            pipe.memory_usage(keys.groups(purpose), samples=3)
        commands = [words for words, _ in pipe.command_stack]
        replies = pipe.execute(raise_on_error=False)
    wrong = [str(words[1]) for words, reply in zip(commands, replies, strict=True) if _is_of_another_type(reply)]
    return [_tolerate(reply) for reply in replies], [key.removeprefix(keys.prefix) for key in dict.fromkeys(wrong)]


def _is_of_another_type(reply: Any) -> bool:
    return isinstance(reply, redis.ResponseError) and _ANOTHER_TYPE in str(reply)


def _tolerate(reply: Any) -> Any:
    """Replace tolerable errors by an empty reply; raise all others.

    Before the first ticket there is no consumer group, a reader may lack permissions, and others may have written under
    the run's keys.
    """
    if not isinstance(reply, Exception):
        return reply
    if isinstance(reply, redis.ResponseError) and any(word in str(reply) for word in _PASSED_OVER):
        return {}
    raise reply


def _to_counts(replies: Sequence[Any], *, at: float) -> StreamCounts:
    num_tickets, pending, oldest, num_groups, num_bytes = replies
    consumers = (pending or {}).get("consumers", ())
    leased_by = {consumer["name"].decode(errors="replace"): consumer["pending"] for consumer in consumers}
    leased_by.pop(HANDED_BACK, None)
    leases = [lease for entry in oldest or () if (lease := _to_lease(entry, at=at)).worker != HANDED_BACK]
    return StreamCounts(
        num_tickets=num_tickets or 0,
        num_leased=sum(leased_by.values()),
        leased_by=leased_by,
        num_groups=num_groups or 0,
        oldest_lease=leases[0] if leases else None,
        num_group_bytes=num_bytes or 0,
    )


def _to_lease(entry: Mapping[str, Any], *, at: float) -> OldestLease:
    issued_ms, _ = entry_order(entry["message_id"].decode())
    return OldestLease(
        worker=entry["consumer"].decode(errors="replace"),
        issued_s=max(0.0, at - issued_ms / 1000),
        silent_s=entry["time_since_delivered"] / 1000,
        times_leased=entry["times_delivered"],
    )


def _to_letter(fields: Fields) -> Mapping[str, str]:
    return {label: _text(fields.get(name, b"")) for label, name in (("ticket", b"n"), ("error", b"error"))}


def _to_server(info: Mapping[str, Any]) -> Server:
    failed = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name, "ok") != "ok"]
    return Server(
        version=str(info.get("redis_version", "")),
        max_memory_policy=str(info.get("maxmemory_policy", "noeviction")),
        role=str(info.get("role", "master")),
        save_error=", ".join(f"{name} is {info[name]}" for name in failed),
    )


@dataclass(frozen=True, slots=True)
class _Lenient:
    """Reads the valid values, and notes the invalid ones."""

    unreadable: list[str]

    def value(self, read: Callable[[bytes], T], hash_name: str, fields: Fields, name: str) -> T | None:
        """Read a value; None if it is missing or invalid."""
        raw = fields.get(name.encode())
        try:
            return None if raw is None else read(raw)
        except ValueError:
            self.unreadable.append(f"{hash_name} {name} = {_text(raw or b'')[:_SHOWN]!r}")
            return None

    def all_of(self, what: str, stored: Sized, decoded: Sequence[T]) -> tuple[T, ...]:
        if num_missing := len(stored) - len(decoded):
            self.unreadable.append(f"{num_missing} of {len(stored)} {what}")
        return tuple(decoded)


def to_records(entries: Entries) -> list[Record]:
    """Decode the valid entries of a metrics stream."""
    return _readable(entries, _to_record)


def _readable(entries: Entries, read: Callable[[bytes, Fields], T]) -> list[T]:
    found: list[T] = []
    for entry in entries:
        with suppress(KeyError, ValueError, RecursionError):
            found.append(read(*entry))
    return found


def _to_record(entry_id: bytes, fields: Fields) -> Record:
    return Record(
        id=entry_id.decode(),
        step=_to_int(fields[b"step"]),
        term=_to_int(fields[b"term"]),
        at=_to_float(fields[b"at"]),
        values=_numbers(_mapping(fields[b"values"])),
    )


def _to_event(entry_id: bytes, fields: Fields) -> Event:
    return Event(
        id=entry_id.decode(),
        kind=_text(fields[b"kind"]),
        term=_to_int(fields[b"term"]),
        at=_to_float(fields[b"at"]),
        detail=_mapping(fields[b"detail"]),
    )


def _mapping(raw: bytes) -> dict[str, Any]:
    found = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Check that all values are numbers; the learner writes no others."""
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
