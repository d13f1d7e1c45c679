"""Becoming the learner of a run: the lease that keeps others out; and why the fence refuses what is written.

    await_lease ─► the durable term, in the checkpoint root ─► claim (term known to Redis) ─► writes, renew ─► release

The lease comes before the term, so that a learner that is not admitted leaves no trace in the run's history. Others
wait for the lease; what protects the data is the fence: once another has the lease or a newer term, every script of
this learner is refused, however long it slept. Blocks in `await_lease` and `claim` (at most `wait_s`) and in every call
while Redis is away (at most `give_up_after_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from streamrl.crashpoints import crashpoint
from streamrl.errors import Fenced, ResourceError, RunGone, StreamrlError, TransportError
from streamrl.protocol.transport import learner_scripts as scripts
from streamrl.protocol.transport.address import server_name
from streamrl.protocol.transport.connection import Call, repeat, run
from streamrl.protocol.transport.keys import Keys

_CLAIM_PAUSE_S = 0.1


def await_lease(
    client: redis.Redis,
    keys: Keys,
    *,
    holder: str,
    lease_s: float,
    wait_s: float,
    takeover: bool = False,
    give_up_after_s: float = 120.0,
) -> None:
    """Take the run's lease, now if nobody or this very holder has it, or with `takeover`; else wait for its end.
    TransportError names the holder who still renews it after `wait_s`."""
    call = Call(scripts.TAKE_LEASE, (keys.lease,), (holder, int(lease_s * 1000), int(takeover)))

    def try_once() -> str | None:
        reply = repeat(client, "take the run's lease", partial(run, client, call), give_up_after_s=give_up_after_s)
        return other_holder(reply)

    wait_out(try_once, keys, wait_s)
    crashpoint("lease.taken")


def lease_holder(client: redis.Redis, keys: Keys, *, give_up_after_s: float) -> str | None:
    """Who the learner is; None when nobody is."""
    get = partial(client.get, keys.lease)
    holder: Any = repeat(client, "say who learns the run", get, give_up_after_s=give_up_after_s)
    return None if holder is None else str(holder.decode(errors="replace"))


def known_term(client: redis.Redis, keys: Keys, run_uid: str, *, takeover: bool = False, give_up_after_s: float) -> int:
    """The newest term of this run that Redis has seen; 0 when it has seen none. RunGone where the run was removed, but
    for a `takeover`, which begins it anew there."""

    def read() -> Any:
        return *client.hmget(keys.meta, "uid", "term"), client.get(keys.tombstone)

    uid, term, tombstone = repeat(client, "say how the run stands", read, give_up_after_s=give_up_after_s)
    if tombstone == run_uid.encode() and not takeover:
        raise RunGone(
            f"run {keys.name!r} was removed from Redis at {server_name(client)}: with --takeover it goes on there, "
            "from its newest checkpoint; or set another name"
        )
    return int(term) if uid == run_uid.encode() and term else 0


def wait_out(try_once: Callable[[], str | None], keys: Keys, wait_s: float) -> None:
    """Until nobody else holds the lease; `try_once` says who does."""
    deadline = time.monotonic() + wait_s
    while (other := try_once()) is not None:
        if time.monotonic() >= deadline:
            raise TransportError(
                f"run {keys.name!r} has a learner already: {other} holds its lease. Stop it, or take over explicitly"
            )
        time.sleep(_CLAIM_PAUSE_S)


def other_holder(reply: list[Any]) -> str | None:
    return str(reply[1].decode(errors="replace")) if reply[0] == b"HELD" else None


def refusal(client: redis.Redis, keys: Keys, *, term: int, what: str, reply: list[Any]) -> StreamrlError:
    """Why a script of the learner of this term did not do `what`."""
    status, *rest = reply
    name = keys.name
    match status:
        case b"FENCED":
            return Fenced(f"run {name!r} has another learner than this one of term {term}: it may not {what}")
        case b"GONE":
            return RunGone(f"run {name!r} was removed from Redis, or another took its name: could not {what}")
        case b"TAKEN":
            uid, state = (part.decode(errors="replace") for part in rest)
            return ResourceError(
                f"name {name!r} is taken: Redis at {server_name(client)} holds another run of that name "
                f"(uid {uid}, {state}); remove that run, or set another name"
            )
        case b"STALE":
            return TransportError(f"Redis already has weights of version {int(rest[0])}: could not {what}")
        case b"UNKNOWN":
            return TransportError(f"Redis has lost the weights: could not {what}")
        case _:
            return TransportError(f"run {name!r} vanished from Redis twice while trying to {what}")
