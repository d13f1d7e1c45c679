"""All runs in a Redis. The keys are gone through by SCAN, a page at a time, and for a bounded time only."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import redis

from streamrl.transport.keys import Keys
from streamrl.transport.snapshot import snapshot

_KEYS_A_PAGE = 2_000
_META = re.compile(r"^streamrl:\{(.+)\}:meta$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    name: str
    state: str
    is_live: bool  # a learner holds it
    epoch: int
    step: int
    parts: int  # that have reported
    created_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    runs: tuple[ListedRun, ...]  # the youngest first
    is_complete: bool  # False: time was up before all keys had been seen


def list_runs(client: redis.Redis, *, within_s: float = 10.0) -> Listing:
    deadline = time.monotonic() + within_s
    names: set[str] = set()
    cursor = 0
    while True:
        reply: Any = client.scan(cursor, match="streamrl:{*}:meta", count=_KEYS_A_PAGE, _type="hash")
        cursor, page = reply
        found = (_META.match(key.decode(errors="replace")) for key in page)
        names.update(match[1] for match in found if match)
        if cursor == 0 or time.monotonic() > deadline:
            break
    runs = sorted((_read(client, name) for name in names), key=lambda run: (-(run.created_at or 0.0), run.name))
    return Listing(runs=tuple(runs), is_complete=cursor == 0)


def _read(client: redis.Redis, name: str) -> ListedRun:
    seen = snapshot(client, Keys(name))
    return ListedRun(
        name=name,
        state=seen.run.state if seen.run else "unknown",
        is_live=seen.holder is not None,
        epoch=seen.run.epoch if seen.run else 0,
        step=seen.step,
        parts=len(seen.reports),
        created_at=seen.created_at,
    )
