"""What each part of a run may do in Redis: the least that it needs, from the real names of the keys.

    worker ── takes tickets, adds groups, reads weights       monitor ── reads, but no weights
    learner ── issues, commits, announces, stores weights     operator ── monitor, and the words of control

A script runs with its caller's rights: the right to run one (`eval`) is a right to any text on the keys of a run, and
each command in it is checked for itself. From Redis 7 on a grant is a selector: these commands on these keys. 6.2 knows
one list of commands and one of keys, so there any command of a role goes with any of its keys; `WEAKER_BEFORE_7` says
what follows from that. Blocks nothing: this is text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from streamrl.transport.keys import Keys
from streamrl.wire.ticket import PURPOSES

Role = Literal["worker", "learner", "monitor", "operator"]
ROLES: tuple[Role, ...] = ("worker", "learner", "monitor", "operator")
ANY_RUN = "*"

WEAKER_BEFORE_7: Mapping[Role, str] = {
    "worker": "it can also write the run's configuration, forge weights, and delete groups and tickets",
    "learner": "it can also delete groups of the run without a commit, and forge groups",
    "monitor": "nothing more: it has only commands that read",
    "operator": "it can also delete any key of a run one by one, and write its configuration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    commands: tuple[str, ...]
    keys: tuple[str, ...] = ()  # patterns; none for commands that name no keys


def grants(role: Role, *, run: str = ANY_RUN) -> list[Grant]:
    """Of one run, or of any."""
    keys = Keys(run)
    return list({"worker": _worker, "learner": _learner, "monitor": _monitor, "operator": _operator}[role](keys))


def rules(role: Role, *, run: str = ANY_RUN, selectors: bool = True) -> str:
    """As `ACL SETUSER` and a file of users take them; `selectors` for Redis 7 and newer, and for Valkey."""
    granted = grants(role, run=run)
    if not selectors:
        commands = dict.fromkeys(f"+{command}" for grant in granted for command in grant.commands)
        keys = dict.fromkeys(f"~{key}" for grant in granted for key in grant.keys)
        return " ".join(["resetchannels", "-@all", *commands, *keys])
    words = ["resetchannels", "-@all"]
    for grant in granted:
        commands_and_keys = [*(f"+{command}" for command in grant.commands), *(f"~{key}" for key in grant.keys)]
        words.append(f"({' '.join(commands_and_keys)})" if grant.keys else " ".join(commands_and_keys))
    return " ".join(words)


def _worker(keys: Keys) -> Iterator[Grant]:
    yield Grant(commands=("ping", "select", "info"))
    yield _scripts(keys)
    read = (keys.meta, keys.weights, keys.manifests, keys.blobs, keys.control, keys.progress)
    yield Grant(commands=("hget", "hmget", "hgetall"), keys=read)
    yield Grant(commands=("get",), keys=(keys.tombstone, keys.receipt("*", "*"), _chunks(keys)))
    yield Grant(commands=("xread",), keys=(keys.announced,))
    leasing = ("xreadgroup", "xrange", "xpending", "xclaim", "xack", "xdel", "xgroup|delconsumer")
    yield Grant(commands=leasing, keys=_tickets(keys))
    yield Grant(commands=("xadd",), keys=_groups(keys))
    yield Grant(commands=("set",), keys=(keys.receipt("*", "*"),))
    yield Grant(commands=("hincrby",), keys=(keys.counters,))
    yield from _reports(keys)


def _learner(keys: Keys) -> Iterator[Grant]:
    yield Grant(commands=("ping", "select", "info"))
    yield _scripts(keys)
    yield Grant(commands=("hget", "hmget", "hset", "hsetnx", "hdel"), keys=(keys.meta,))
    yield Grant(commands=("get",), keys=(keys.tombstone, keys.lease))
    yield Grant(commands=("set",), keys=(keys.lease,))
    yield Grant(commands=("hget",), keys=(keys.control,))
    # One selector must allow all keys of one call: the lease and the word of control go together.
    yield Grant(commands=("del",), keys=(keys.tombstone, keys.lease, keys.control))
    issuing = ("xadd", "xack", "xdel", "xrange", "xpending", "xgroup|create", "xgroup|delconsumer", "xinfo|consumers")
    yield Grant(commands=issuing, keys=_tickets(keys))
    consuming = ("xread", "xrange", "xdel", "xtrim", "exists", "xsetid")
    making = ("xgroup|create", "xgroup|destroy", "xinfo|stream")
    yield Grant(commands=(*consuming, *making), keys=_groups(keys))
    yield Grant(commands=("hget", "hset"), keys=(keys.appends, keys.weights))
    yield Grant(commands=("hincrby",), keys=(keys.counters,))
    yield Grant(commands=("xadd", "xdel"), keys=(keys.dead,))
    yield Grant(commands=("hget", "hkeys", "hdel"), keys=(keys.retry_requests,))
    yield Grant(commands=("hgetall", "hset", "hdel"), keys=(keys.retried,))
    yield Grant(commands=("hget", "hmget", "hkeys", "hset", "hdel"), keys=(keys.manifests,))
    yield Grant(commands=("xadd",), keys=(keys.announced,))
    yield Grant(commands=("hget", "hgetall", "hset", "hdel"), keys=(keys.blobs,))
    yield Grant(commands=("get", "set", "unlink"), keys=(_chunks(keys),))
    yield Grant(commands=("xadd",), keys=(*_metrics(keys), keys.events))
    yield Grant(commands=("hgetall",), keys=(keys.progress,))  # do workers reject the weights, all of them?
    yield from _reports(keys)


def _monitor(keys: Keys) -> Iterator[Grant]:
    yield Grant(commands=("ping", "select", "info", "time", "scan", "multi", "exec"))
    hashes = (keys.meta, keys.weights, keys.counters, keys.progress, keys.control, keys.retry_requests, keys.retried)
    yield Grant(commands=("hget", "hmget", "hgetall", "hlen"), keys=(*hashes, keys.manifests))
    yield Grant(commands=("get", "pttl", "exists"), keys=(keys.lease, keys.tombstone))
    streams = (*_tickets(keys), *_groups(keys), keys.dead, *_metrics(keys), keys.events)
    looking = ("xlen", "xrange", "xrevrange", "xread", "xpending", "xinfo|stream", "memory|usage")
    yield Grant(commands=looking, keys=streams)


def _operator(keys: Keys) -> Iterator[Grant]:
    yield from _monitor(keys)
    yield _scripts(keys)
    yield Grant(commands=("hset",), keys=(keys.control,))
    yield Grant(commands=("xadd",), keys=(keys.events,))
    yield Grant(commands=("xdel",), keys=(keys.dead,))
    yield Grant(commands=("hsetnx", "hdel"), keys=(keys.retry_requests,))
    # To remove a run: the tombstone in the place of what is alive, then the rest.
    yield Grant(commands=("set",), keys=(keys.tombstone,))
    yield Grant(commands=("del",), keys=(keys.meta, keys.lease, keys.control, *_tickets(keys), *_groups(keys)))
    yield Grant(commands=("unlink",), keys=(f"{keys.prefix}*",))


def _scripts(keys: Keys) -> Grant:
    return Grant(commands=("eval", "evalsha"), keys=(f"{keys.prefix}*",))


def _reports(keys: Keys) -> Iterator[Grant]:
    yield Grant(commands=("time",))
    yield Grant(commands=("hset", "hlen", "hdel", "del"), keys=(keys.progress,))
    yield Grant(commands=("zadd", "zcard", "zrangebyscore", "zrem"), keys=(keys.reported,))


def _tickets(keys: Keys) -> tuple[str, ...]:
    return tuple(keys.tickets(purpose) for purpose in PURPOSES)


def _groups(keys: Keys) -> tuple[str, ...]:
    return tuple(keys.groups(purpose) for purpose in PURPOSES)


def _metrics(keys: Keys) -> tuple[str, ...]:
    return (keys.metrics, f"{keys.metrics}:*")


def _chunks(keys: Keys) -> str:
    return f"{keys.prefix}blob:*"
