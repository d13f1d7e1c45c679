"""Checks of the services that a run uses.

Its Redis: reachable, recent enough, durable, fast.
Its reward services and teacher servers: reachable, at the addresses that workers use and as workers reach them.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
import timeit
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import redis

from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS, LOCAL_REWARD_SERVER, judge_base, teacher_base
from streamrl.config.schema import SERVICES, HttpReward, JudgeReward
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
_KEYED = (401, 403)
_ONLY_POST = (405, 501)


def check_redis(loaded: Loaded) -> Iterator[Finding]:
    settings = loaded.config.redis
    if settings.url == EMBEDDED_REDIS:
        yield ok("redis", f"embedded: {find_server()} will serve the run's folder")
        return
    with connect(settings.url, settings) as client:
        try:
            info: Any = client.info()
            latency = _latency(client)
        except redis.RedisError as failure:
            remedy = "connect as a user with that right; `streamrl redis acl` prints the rights of each user"
            yield error("redis", f"a check was refused: {failure}", remedy)
            return
        sizes = settings.max_backlog_bytes, budget_in_redis(loaded.config.weights)
        faults = server_faults(server_name(client), info, *sizes)
        how_to_set = partial(_how_to_set, client)
        for name, finding in fitness(info, needed_memory(*sizes), how_to_set).items():
            remedy = how_to_set("maxmemory-policy noeviction") if name == "policy" else "fix it as described"
            yield error(f"redis {name}", faults[name], remedy) if name in faults else finding
        yield _durability(info, how_to_set)
        yield latency


def _how_to_set(client: redis.Redis, setting: str) -> str:
    """Return how to change a setting of this server. Called only for a remedy: a refusal shows in its ACL LOG."""
    try:
        client.config_get("maxmemory-policy")
    except redis.exceptions.NoPermissionError:
        return f"redis-cli CONFIG SET {setting}, as a user with that right"
    except redis.exceptions.ResponseError:
        return f"it does not accept CONFIG, as usual for managed services: set {setting} in the service's parameters"
    return f"redis-cli CONFIG SET {setting}, and set it in redis.conf, too, so that it survives a restart"


def fitness(info: Mapping[str, Any], needed: int, how_to_set: Callable[[str], str]) -> dict[str, Finding]:
    """Check a server without `server_faults`, by the same topics. What it does not report counts as in order.

    `how_to_set`: returns how to change a setting."""
    policy = str(info.get("maxmemory_policy", "noeviction"))
    limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
    found = {
        "version": ok("redis version", str(info["redis_version"])),
        "policy": ok("redis policy", policy),
        "memory": ok("redis memory", f"{size(used)} used" + (f" of {size(limit)}" if limit else ", without a limit")),
    }
    if policy != "noeviction":
        seen = f"{policy}, which is safe only while maxmemory is not set"
        found["policy"] = warning("redis policy", seen, how_to_set("maxmemory-policy noeviction"))
    if limit and used + needed > limit:
        seen = f"{found['memory'].evidence}; redis.max_backlog_bytes and weights.max_store_bytes may need "
        found["memory"] = warning("redis memory", f"{seen}{size(needed)} more", "raise maxmemory, or lower them")
    elif finding := _host(info, limit or used + needed):
        found["memory"] = finding
    if info.get("role", "master") != "master":
        seen = f"a replica of {info.get('master_host')}:{info.get('master_port')}, which accepts no writes"
        found["role"] = error(
            "redis role", seen, "set redis.url to the master; in a managed service, to its primary endpoint"
        )
    if info.get("cluster_enabled"):
        seen = "a node of a Redis Cluster, which redirects clients to other nodes"
        found["cluster"] = error("redis cluster", seen, "use a server without cluster mode; Sentinel is supported")
    return found


def _host(info: Mapping[str, Any], max_bytes: int) -> Finding | None:
    """Check that its machine has the memory it may use; otherwise the kernel kills it or swaps before maxmemory
    acts."""
    machine_bytes, (factor, divisor) = info.get("total_system_memory", 0), _REWRITING
    if not machine_bytes or max_bytes * factor // divisor <= machine_bytes:
        return None
    return warning(
        "redis memory",
        f"it may hold {size(max_bytes)}, and needs a quarter more while it saves to disk; "
        f"its machine has {size(machine_bytes)}",
        "set maxmemory to four fifths of the machine's memory, and lower redis.max_backlog_bytes and "
        "weights.max_store_bytes to fit",
    )


def _durability(info: Mapping[str, Any], how_to_set: Callable[[str], str]) -> Finding:
    failed = [name for name in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(name, "ok") != "ok"]
    if failed:
        seen = f"{failed[0]} is {info[failed[0]]}: it cannot write to its disk, and may refuse writes"
        return error("redis durability", seen, "free space on its disk; its log says what failed")
    if info.get("aof_enabled"):
        return ok("redis durability", "append-only file is on")
    replicas = info.get("connected_slaves", 0)
    backup = f", but {replicas} replicas, which may lack the last writes" if replicas else ""
    return warning(
        "redis durability",
        f"append-only file is off{backup}: if Redis crashes, the tickets since the last checkpoint are generated again",
        f"if that costs too much: {how_to_set('appendonly yes')}",
    )


def _latency(client: redis.Redis) -> Finding:
    times_ms = [1000 * took_s for took_s in timeit.repeat(client.ping, number=1, repeat=_PINGS)]
    typical, worst = median(times_ms), max(times_ms)
    timing = f"{typical:.2f} ms, worst of {_PINGS}: {worst:.1f} ms"
    if typical > _TOO_SLOW_MS:
        return error("redis latency", timing, "run Redis closer to learner and workers")
    if typical > _SLOW_MS:
        return warning("redis latency", timing, "run Redis closer: each step takes several round trips")
    return ok("redis latency", timing)


def check_rewards(loaded: Loaded) -> Iterator[Finding]:
    """Check whether services are reachable; functions have a trial instead."""
    for name, source in loaded.config.rewards.items():
        if isinstance(source, SERVICES):
            yield from (_service(f"reward {name}", url, partial(_asked, source)) for url in source.urls)


def check_teacher(loaded: Loaded) -> Iterator[Finding]:
    """Check whether the servers are reachable; workers compare their tokenizer with the policy's."""
    teacher = loaded.config.teacher
    yield from () if teacher is None else (_service("teacher", teacher_base(url), _health) for url in teacher.urls)


def _asked(source: HttpReward | JudgeReward, url: str) -> str:
    """Return what to ask there without a sample. An address of a reward with a path is the one that workers post to."""
    if isinstance(source, JudgeReward):
        return f"{judge_base(url)}/models"
    return url if urlsplit(url).path.strip("/") else _health(url)


def _health(url: str) -> str:
    return f"{url.rstrip('/')}/health"


def _service(label: str, address: str, asked_at: Callable[[str], str]) -> Finding:
    if address == LOCAL_REWARD_SERVER:
        return ok(label, "the reward server that `streamrl up` starts here")
    asked, opener, began = address, _opener(), time.perf_counter()
    try:
        asked = asked_at(address)
        with opener.open(asked, timeout=_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as reply:  # something answers there, but it may not have /health
        if reply.code in _KEYED:
            return ok(label, f"{address} answers, and requires a key")
        if reply.code not in _ONLY_POST:
            unwell = reply.code == 429 or reply.code >= 500
            remedy = "it is there but unwell: see its log" if unwell else "check that the server has this path"
            if location := reply.headers.get("location"):
                remedy = f"workers follow no redirects: set the address to the server of {location}"
            return warning(label, f"{asked} answers with status {reply.code}", remedy)
    except (OSError, ValueError) as failure:
        return error(label, f"{asked} does not answer: {failure}", f"start it, or fix the address{_proxies()}")
    except http.client.HTTPException as failure:
        return error(label, f"{asked} does not answer in HTTP: {failure}", "fix the address: another server is there")
    return ok(label, f"{address} answers in {1000 * (time.perf_counter() - began):.0f} ms")


def _proxies() -> str:
    """Say that workers use no proxy, if the environment has one."""
    found = [f"{name}_proxy" for name in ("http", "https", "all") if name in urllib.request.getproxies_environment()]
    return f"; {found[0]} is set, but workers use no proxy: they must reach it directly" if found else ""


def _opener() -> urllib.request.OpenerDirector:
    """Return what asks as a worker does: without proxies and redirects, and trusting what its HTTP client trusts."""
    context = ssl.create_default_context()  # with the machine's authorities, and SSL_CERT_FILE's
    with contextlib.suppress(ImportError):
        import certifi  # comes with the workers' HTTP client

        context.load_verify_locations(certifi.where())
    https = urllib.request.HTTPSHandler(context=context)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), https, _NoRedirects)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Leave the answer as it is: an error with its status."""
