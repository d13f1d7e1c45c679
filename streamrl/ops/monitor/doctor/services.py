"""Checks of the services that a run uses.

Its Redis: reachable, recent enough, durable, fast.
Its reward services and teacher servers: reachable.
"""

from __future__ import annotations

import time
import timeit
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, Literal

import redis

from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS, LOCAL_REWARD_SERVER
from streamrl.config.schema import SERVICES
from streamrl.finding import Finding, error, ok, warning
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.connection import connect, needed_memory, server_faults
from streamrl.protocol.transport.embedded import find_server
from streamrl.protocol.weights.stores import budget_in_redis
from streamrl.terminal import size

_PINGS = 20
_SLOW_MS, _TOO_SLOW_MS = 5.0, 100.0
_REWRITING = 5, 4  # memory factor while the append-only file is rewritten, as a fraction
_TIMEOUT_S = 5.0  # per service


def check_redis(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.config.redis
    if settings.url == EMBEDDED_REDIS:
        yield ok("redis", f"embedded: {find_server()} will serve the run's folder")
        return
    with connect(settings.url, settings) as client:
        try:
            info: Any = client.info()
            latency = _latency(client)
        except redis.RedisError as refused:
            remedy = "ask as a user who may; `streamrl redis acl` prints what each may"
            yield error("redis", f"it refuses a check: {refused}", remedy)
            return
        sizes = settings.max_backlog_bytes, budget_in_redis(loaded.config.weights)
        faults = server_faults(server_name(client), info, *sizes)
        told = partial(_told, client)
        for name, finding in fitness(info, needed_memory(*sizes), told).items():
            remedy = told("maxmemory-policy noeviction") if name == "policy" else "fix it as described"
            yield error(f"redis {name}", faults[name], remedy) if name in faults else finding
        yield _durability(info, told)
        yield latency


def _told(client: redis.Redis, words: str) -> str:
    """Return how to change a setting of this server. Called only for a remedy: a refusal shows in its ACL LOG."""
    try:
        client.config_get("maxmemory-policy")
    except redis.exceptions.NoPermissionError:
        return f"redis-cli CONFIG SET {words}, as a user who may"
    except redis.exceptions.ResponseError:
        return f"it takes no CONFIG, as managed services do not: set {words} among the service's parameters"
    return f"redis-cli CONFIG SET {words}, and in its configuration, for its next start"


def fitness(info: Mapping[str, Any], needed: int, told: Callable[[str], str]) -> dict[str, Finding]:
    """Check a server without `server_faults`, by the same topics. What it does not report counts as in order.

    `told`: returns how to change a setting."""
    policy = str(info.get("maxmemory_policy", "noeviction"))
    limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
    found = {
        "version": ok("redis version", str(info["redis_version"])),
        "policy": ok("redis policy", policy),
        "memory": ok("redis memory", f"{size(used)} used" + (f" of {size(limit)}" if limit else ", without a limit")),
    }
    if policy != "noeviction":
        seen = f"{policy}, harmless only as long as maxmemory is not set"
        found["policy"] = warning("redis policy", seen, told("maxmemory-policy noeviction"))
    if limit and used + needed > limit:
        seen = f"{found['memory'].evidence}; redis.max_backlog_bytes and weights.max_store_bytes may need "
        found["memory"] = warning("redis memory", f"{seen}{size(needed)} more", "raise maxmemory, or lower them")
    elif finding := _host(info, limit or used + needed):
        found["memory"] = finding
    if info.get("role", "master") != "master":
        seen = f"a replica of {info.get('master_host')}:{info.get('master_port')}, which takes no writes"
        found["role"] = error("redis role", seen, "name the master in redis.url; a managed service's primary endpoint")
    if info.get("cluster_enabled"):
        seen = "a node of a cluster, which leads its clients to others"
        found["cluster"] = error("redis cluster", seen, "use a server without cluster mode; sentinels may watch it")
    return found


def _host(info: Mapping[str, Any], kept: int) -> Finding | None:
    """Check that its machine has the memory it may use; otherwise the kernel kills it or swaps before maxmemory
    acts."""
    has, (more, of) = info.get("total_system_memory", 0), _REWRITING
    if not has or kept * more // of <= has:
        return None
    seen = f"it may keep {size(kept)}, and take a quarter more to write it down; its machine has {size(has)}"
    return warning("redis memory", seen, "set maxmemory to four fifths of the machine, and lower what the run may keep")


def _durability(info: Mapping[str, Any], told: Callable[[str], str]) -> Finding:
    failed = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(name, "ok") != "ok"]
    if failed:
        seen = f"{failed[0]} is {info[failed[0]]}: it cannot write to its disk, and may take no writes"
        return error("redis durability", seen, "free space on its disk; its log says what failed")
    if info.get("aof_enabled"):
        return ok("redis durability", "append-only file is on")
    replicas = info.get("connected_slaves", 0)
    has = f", but {replicas} replicas, which may lack the last writes" if replicas else ""
    return warning(
        "redis durability",
        f"append-only file is off{has}: after a crash the tickets since the last checkpoint are generated again",
        f"if that costs too much: {told('appendonly yes')}",
    )


def _latency(client: redis.Redis) -> Finding:
    times_ms = [1000 * took_s for took_s in timeit.repeat(client.ping, number=1, repeat=_PINGS)]
    typical, worst = median(times_ms), max(times_ms)
    told = f"{typical:.2f} ms, {worst:.1f} ms at worst of {_PINGS}"
    if typical > _TOO_SLOW_MS:
        return error("redis latency", told, "run Redis closer to learner and workers")
    if typical > _SLOW_MS:
        return warning("redis latency", told, "run Redis closer: each step takes several round trips")
    return ok("redis latency", told)


def check_rewards(loaded: Loaded) -> Iterator[Finding]:
    """Check whether services are reachable; functions have a trial instead."""
    for name, source in loaded.config.rewards.items():
        if isinstance(source, SERVICES):
            judges = source.type == "judge"
            yield from (
                _service(f"reward {name}", url, looks_at="models" if judges else "health") for url in source.urls
            )


def check_teacher(loaded: Loaded) -> Iterator[Finding]:
    """Check whether the servers are reachable; workers compare their tokenizer with the policy's."""
    teacher = loaded.config.teacher
    yield from () if teacher is None else (_service("teacher", url, looks_at="health") for url in teacher.urls)


def _service(label: str, address: str, *, looks_at: Literal["models", "health"]) -> Finding:
    if address == LOCAL_REWARD_SERVER:
        return ok(label, "the reward server that `streamrl up` starts here")
    url = f"{address.rstrip('/')}/{looks_at}"
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as answer:  # something answers there, but it may not have /health
        if looks_at == "models" and answer.code in (401, 403):
            return ok(label, f"{address} answers, and requires a key")
        return warning(label, f"{url} answers {answer.code}", "check that this path is served there")
    except (OSError, ValueError) as failed:
        return error(label, f"{url} does not answer: {failed}", "start it, or fix the address")
    return ok(label, f"{address} answers in {1000 * (time.perf_counter() - began):.0f} ms")
