"""The Redis permissions of each role in a run: the least that it needs, by the actual names of the keys.

    worker ── takes tickets, adds groups, reads weights       monitor ── reads, but no weights
    learner ── issues, commits, announces, stores weights     operator ── monitor, and the control commands

A script runs with its caller's permissions: permission for `eval` allows any script on a run's keys, and each command
in it is checked separately. From Redis 7 on a grant is a selector: these commands on these keys. Redis 6.2 has one list
of commands and one of keys, so there any command of a role may use any of its keys; `WEAKER_BEFORE_7` states the
consequences. Blocks on nothing: this is text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.wire.ticket import PURPOSES

Role = Literal["worker", "learner", "monitor", "operator"]
ROLES: tuple[Role, ...] = ("worker", "learner", "monitor", "operator")
ANY_RUN = "*"
# Users for servers, without access to keys: a replica, and a sentinel, which watches a master and fails over.
Server = Literal["replica", "sentinel"]
SERVERS: Mapping[Server, str] = {
    "replica": "resetchannels -@all +psync +replconf +ping",
    "sentinel": "resetchannels &__sentinel__:* -@all +ping +info +role +publish +subscribe +multi +exec +slaveof "
    "+config|rewrite +client|setname +client|kill +script|kill",
}

WEAKER_BEFORE_7: Mapping[Role, str] = {
    "worker": "it can also write the run's configuration, forge weights, and delete groups and tickets",
    "learner": "it can also delete groups of the run without a commit, and forge groups",
    "monitor": "nothing more: it has only commands that read",
    "operator": "it can also delete any key of a run one by one, and write its configuration",
}


# Commands, and patterns of the keys that they may use; empty for commands without keys.
Grant = tuple[str, tuple[str, ...]]


def grants(role: Role, *, run: str = ANY_RUN) -> Iterator[Grant]:
    """Yield the grants of a role for one run, or for any."""
    return {"worker": _worker, "learner": _learner, "monitor": _monitor, "operator": _operator}[role](Keys(run))


def rules(role: Role, *, run: str = ANY_RUN, selectors: bool = True) -> str:
    """Return rules for `ACL SETUSER` and ACL files; `selectors` for Redis 7 and newer, and for Valkey."""
    granted = [
        ([f"+{command}" for command in commands.split()], [f"~{key}" for key in keys])
        for commands, keys in grants(role, run=run)
    ]
    if not selectors:
        commands = dict.fromkeys(command for commands, _ in granted for command in commands)
        keys = dict.fromkeys(key for _, keys in granted for key in keys)
        return " ".join(["resetchannels", "-@all", *commands, *keys])
    selected = (f"({' '.join(commands + keys)})" if keys else " ".join(commands) for commands, keys in granted)
    return " ".join(["resetchannels", "-@all", *selected])


def _worker(keys: Keys) -> Iterator[Grant]:
    yield "ping select info", ()
    yield _scripts(keys)
    read = (keys.meta, keys.weights, keys.manifests, keys.blobs, keys.control, keys.progress)
    yield "hget hmget hgetall", read
    yield "get", (keys.tombstone, keys.receipt("*", "*"), _chunks(keys))
    yield "getrange", (_chunks(keys),)
    yield "xread", (keys.announced,)
    yield "xreadgroup xrange xpending xclaim xack xdel xgroup|delconsumer", _tickets(keys)
    yield "xadd", _groups(keys)
    yield "set", (keys.receipt("*", "*"),)
    yield "hincrby", (keys.counters,)
    yield "hset hget hgetall hdel hlen hexists hrandfield pexpire", (keys.peers("*"), keys.claims("*"))
    yield "set get", (keys.peers_secret,)
    yield from _reports(keys)


def _learner(keys: Keys) -> Iterator[Grant]:
    yield "ping select info", ()
    yield _scripts(keys)
    yield "hget hmget hset hsetnx hdel", (keys.meta,)
    yield "get", (keys.tombstone, keys.lease)
    yield "set", (keys.lease,)
    yield "hget", (keys.control,)
    # One selector must allow all keys of a call: scripts delete the lease together with the control command.
    yield "del", (keys.tombstone, keys.lease, keys.control)
    issuing = "xadd xack xdel xrange xpending xgroup|create xgroup|delconsumer xinfo|consumers"
    yield issuing, _tickets(keys)
    yield "xread xrange xdel xtrim exists xsetid xgroup|create xgroup|destroy xinfo|stream", _groups(keys)
    yield "hget hset hdel", (keys.appends,)
    yield "hget hset", (keys.weights,)
    yield "hincrby", (keys.counters,)
    yield "xadd xdel xrange", (keys.dead,)
    yield "hget hkeys hset hdel", (keys.retry_requests,)
    yield "smembers srem", (keys.purged,)
    yield "hgetall hset hdel", (keys.retried,)
    yield "hget hmget hkeys hset hdel", (keys.manifests,)
    yield "xadd", (keys.announced,)
    yield "hget hgetall hset hdel", (keys.blobs,)
    yield "get set unlink", (_chunks(keys),)
    yield "xadd", (*_metrics(keys), keys.events)
    yield "hgetall", (keys.progress,)  # whether all workers reject the weights
    yield from _reports(keys)


def _monitor(keys: Keys) -> Iterator[Grant]:
    yield "ping select info time scan", ()
    hashes = (keys.meta, keys.weights, keys.counters, keys.progress, keys.control, keys.retry_requests, keys.retried)
    yield "hget hmget hgetall hlen", (*hashes, keys.manifests)
    yield "get pttl exists", (keys.lease, keys.tombstone)
    yield "zrange", (keys.reported,)
    streams = (*_tickets(keys), *_groups(keys), keys.dead, *_metrics(keys), keys.events)
    yield "xlen xrange xrevrange xread xpending xinfo|stream memory|usage", streams


def _operator(keys: Keys) -> Iterator[Grant]:
    yield from _monitor(keys)
    yield _scripts(keys)
    yield "script|kill", ()  # a script that loops, anybody's, holds up all runs of the server
    yield "hset hdel", (keys.control,)
    yield "xadd", (keys.events,)
    yield "xdel", (keys.dead,)
    yield "hsetnx hdel", (keys.retry_requests,)
    yield "sadd", (keys.purged,)
    # To remove a run: replace its main keys by the tombstone, then delete the rest.
    yield "set", (keys.tombstone,)
    yield "del", (keys.meta, keys.lease, keys.control, *_tickets(keys), *_groups(keys))
    yield "unlink", (f"{keys.prefix}*",)


def _scripts(keys: Keys) -> Grant:
    return "eval evalsha", (f"{keys.prefix}*",)


def _reports(keys: Keys) -> Iterator[Grant]:
    yield "time", ()
    yield "hset hlen hdel del", (keys.progress,)
    yield "zadd zcard zrangebyscore zrem", (keys.reported,)


def _tickets(keys: Keys) -> tuple[str, ...]:
    return tuple(keys.tickets(purpose) for purpose in PURPOSES)


def _groups(keys: Keys) -> tuple[str, ...]:
    return tuple(keys.groups(purpose) for purpose in PURPOSES)


def _metrics(keys: Keys) -> tuple[str, ...]:
    return (keys.metrics, f"{keys.metrics}:*")


def _chunks(keys: Keys) -> str:
    return f"{keys.prefix}blob:*"
