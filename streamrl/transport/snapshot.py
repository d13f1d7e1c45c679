"""A run at a glance: everything that monitors, the launcher's display and `--json` show, read in one round trip.

Only reads. Blocks at most some seconds while Redis is away, then TransportError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from streamrl.telemetry.progress import Report
from streamrl.transport.connection import Attempts, repeat
from streamrl.transport.keys import WORKERS, Keys
from streamrl.transport.reports import decode_reports
from streamrl.transport.types import START, Control, RunInfo, to_control
from streamrl.wire.ticket import PURPOSES, Purpose

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step's metrics."""

    id: str
    step: int
    epoch: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the journal."""

    id: str
    kind: str
    epoch: int
    at: float
    detail: Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCounts:
    num_tickets: int  # not yet delivered, leased or not
    num_leased: int
    leased_by: Mapping[str, int]  # worker -> its leases
    num_groups: int  # delivered and not yet committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    at: float
    run: RunInfo | None  # None: no run of this name is there
    created_at: float | None
    step: int  # of the last commit
    cursor: str
    holder: str | None  # who the learner is; None: nobody holds the lease
    control: Control
    streams: Mapping[Purpose, StreamCounts]
    num_dead: int
    latest_version: int | None
    latest_version_step: int
    counters: Mapping[str, int]
    reports: tuple[Report, ...]
    records: tuple[Record, ...]  # the last ones, oldest first
    events: tuple[Event, ...]  # the last ones, oldest first
    used_memory_bytes: int
    max_memory_bytes: int  # 0: no limit is set


def snapshot(
    client: redis.Redis, keys: Keys, *, num_records: int = 1, num_events: int = 20, give_up_after_s: float = _PATIENCE_S
) -> Snapshot:
    def read() -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.meta)
            pipe.hgetall(keys.weights)
            pipe.hgetall(keys.counters)
            pipe.hgetall(keys.progress)
            pipe.get(keys.lease)
            pipe.hget(keys.control, "mode")
            pipe.xlen(keys.dead)
            pipe.xrevrange(keys.metrics, count=num_records)
            pipe.xrevrange(keys.events, count=num_events)
            pipe.info("memory")
            for purpose in PURPOSES:
                pipe.xlen(keys.tickets(purpose))
                pipe.xpending(keys.tickets(purpose), WORKERS)
                pipe.xlen(keys.groups(purpose))
            return [_tolerate_no_group(result) for result in pipe.execute(raise_on_error=False)]

    replies = repeat(read, attempts=Attempts(client, "be looked at", give_up_after_s=give_up_after_s))
    meta, weights, counters, progress, holder, control, num_dead, records, events, memory, *streams = replies
    return Snapshot(
        at=time.time(),
        run=RunInfo.from_hash(keys.name, meta),
        created_at=float(meta[b"created_at"]) if b"created_at" in meta else None,
        step=int(meta.get(b"step", 0)),
        cursor=meta.get(b"cursor", START.encode()).decode(),
        holder=holder.decode(errors="replace") if holder else None,
        control=to_control(control),
        streams={purpose: _to_counts(*streams[3 * place : 3 * place + 3]) for place, purpose in enumerate(PURPOSES)},
        num_dead=num_dead,
        latest_version=int(weights[b"latest"]) if b"latest" in weights else None,
        latest_version_step=int(weights.get(b"step", 0)),
        counters={name.decode(errors="replace"): int(value) for name, value in counters.items()},
        reports=tuple(decode_reports(progress)),
        records=tuple(_to_record(*entry) for entry in reversed(records)),
        events=tuple(_to_event(*entry) for entry in reversed(events)),
        used_memory_bytes=int(memory["used_memory"]),
        max_memory_bytes=int(memory.get("maxmemory", 0)),
    )


def read_records(client: redis.Redis, keys: Keys, *, after: str = START, count: int = 1000) -> list[Record]:
    """Metrics beyond the record `after`, oldest first: for curves, and to go on where the last call ended."""
    attempts = Attempts(client, "read the metrics", give_up_after_s=_PATIENCE_S)
    entries: Any = repeat(lambda: client.xrange(keys.metrics, min=f"({after}", count=count), attempts=attempts)
    return [_to_record(*entry) for entry in entries]


def _tolerate_no_group(result: Any) -> Any:
    """Before the first ticket there is no group of workers; any other error is one."""
    if not isinstance(result, Exception):
        return result
    if isinstance(result, redis.ResponseError) and str(result).startswith("NOGROUP"):
        return {"pending": 0, "consumers": []}
    raise result


def _to_counts(num_tickets: int, pending: Mapping[str, Any], num_groups: int) -> StreamCounts:
    return StreamCounts(
        num_tickets=num_tickets,
        num_leased=pending["pending"],
        leased_by={one["name"].decode(errors="replace"): one["pending"] for one in pending["consumers"]},
        num_groups=num_groups,
    )


def _to_record(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Record:
    return Record(
        id=entry_id.decode(),
        step=int(fields[b"step"]),
        epoch=int(fields[b"epoch"]),
        at=float(fields[b"at"]),
        values=json.loads(fields[b"values"]),
    )


def _to_event(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event:
    return Event(
        id=entry_id.decode(),
        kind=fields[b"kind"].decode(errors="replace"),
        epoch=int(fields[b"epoch"]),
        at=float(fields[b"at"]),
        detail=json.loads(fields[b"detail"]),
    )
