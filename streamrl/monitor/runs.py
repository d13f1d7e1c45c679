"""All runs in a Redis. The keys are gone through by SCAN, a page at a time, and for a bounded time only."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

import redis

from streamrl.transport.keys import Keys

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
    keys = Keys(name)
    with client.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.meta, "state", "epoch", "step", "created_at")
        pipe.exists(keys.lease)
        pipe.hlen(keys.progress)
        (state, epoch, step, created_at), lease, parts = pipe.execute()
    return ListedRun(
        name=name,
        state=(state or b"unknown").decode(errors="replace"),
        is_live=bool(lease),
        epoch=int(_number(epoch)),
        step=int(_number(step)),
        parts=parts,
        created_at=_number(created_at) or None,
    )


def _number(value: bytes | None) -> float:
    """0 where there is none: one broken run hides no other."""
    try:
        number = float(value or 0)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
