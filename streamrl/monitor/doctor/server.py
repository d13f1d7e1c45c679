"""The Redis of the run: there, new enough, keeping what it is given, quick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import redis

from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS
from streamrl.errors import ResourceError
from streamrl.monitor.doctor.finding import Finding, error, ok, warning
from streamrl.monitor.units import size
from streamrl.transport.connection import OLDEST_SERVER, connect, needed_memory
from streamrl.transport.embedded import find_server
from streamrl.weights.stores import budget_in_redis

_PINGS = 20
_SLOW_MS, _TOO_SLOW_MS = 5.0, 100.0


def check_redis(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.config.redis
    if settings.url == EMBEDDED_REDIS:
        yield ok("redis", f"embedded: {find_server()} will serve the run's folder")
        return
    try:
        client = connect(settings.url, settings)
    except ResourceError as gone:
        yield error("redis", str(gone), "start it, or mend redis.url")
        return
    with client:
        try:
            info: Any = client.info()
            latency = _latency(client)
        except redis.RedisError as refused:
            remedy = "ask as a user who may; `streamrl redis acl` prints what each may"
            yield error("redis", f"it does not tell of itself: {refused}", remedy)
            return
        yield _version(info)
        yield _policy(info)
        yield _room(info, settings.max_backlog_bytes, budget_in_redis(loaded.config.weights))
        yield _durability(info)
        yield latency


def _version(info: dict[str, Any]) -> Finding:
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        return error("redis version", version, "streamrl needs Redis 6.2 or newer, or Valkey")
    return ok("redis version", version)


def _policy(info: dict[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ok("redis policy", policy)
    remedy = "redis-cli CONFIG SET maxmemory-policy noeviction"
    if info.get("maxmemory", 0):
        return error("redis policy", f"{policy}: it would throw rollouts away", remedy)
    return warning("redis policy", f"{policy}, harmless only as long as maxmemory is not set", remedy)


def _room(info: dict[str, Any], max_backlog_bytes: int, max_store_bytes: int) -> Finding:
    limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
    told = f"{size(used)} used" + (f" of {size(limit)}" if limit else ", without a limit")
    if not limit:
        return ok("redis memory", told)
    settings = f"redis.max_backlog_bytes = {size(max_backlog_bytes)}"
    remedy = "raise maxmemory, or lower redis.max_backlog_bytes"
    if max_store_bytes:
        settings += f" and weights.max_store_bytes = {size(max_store_bytes)}"
        remedy += " or weights.max_store_bytes"
    needed = needed_memory(max_backlog_bytes, max_store_bytes)
    if needed > limit:
        return error("redis memory", f"{told}; {settings} may need {size(needed)}, and a run is refused", remedy)
    if used + needed > limit:
        return warning("redis memory", f"{told}; {settings} may need {size(used + needed)} in all", remedy)
    return ok("redis memory", told)


def _durability(info: dict[str, Any]) -> Finding:
    if info.get("aof_enabled"):
        return ok("redis durability", "append-only file is on")
    return warning(
        "redis durability",
        "append-only file is off: after a crash the tickets since the last checkpoint are generated again",
        "redis-cli CONFIG SET appendonly yes, if that is dear",
    )


def _latency(client: redis.Redis) -> Finding:
    times_ms = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        client.ping()
        times_ms.append(1000 * (time.perf_counter() - began))
    typical, worst = median(times_ms), max(times_ms)
    told = f"{typical:.2f} ms, {worst:.1f} ms at worst of {_PINGS}"
    if typical > _TOO_SLOW_MS:
        return error("redis latency", told, "run Redis nearer to learner and workers")
    if typical > _SLOW_MS:
        return warning("redis latency", told, "run Redis nearer: each step takes some round trips")
    return ok("redis latency", told)
