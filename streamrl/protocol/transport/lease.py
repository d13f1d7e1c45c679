"""Becoming the learner of a run: the lease that keeps others out, and the errors of the fence.

    await_lease ─► the durable term, in the checkpoint root ─► claim (term known to Redis) ─► writes, renew ─► release

The lease comes before the term, so that a learner that is not admitted leaves no trace in the run's history. The lease
makes others wait; the fence protects the data: once another learner has the lease or a newer term, every script of this
one is refused, however long it slept. Blocks in `await_lease` and `claim` (at most `wait_s`) and in every call while
Redis is down (at most `give_up_after_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from streamrl.crashpoints import crashpoint
from streamrl.errors import Ended, Fenced, Refused, Replaced, ResourceError, RunGone, StreamrlError, TransportError
from streamrl.protocol.transport import learner_scripts as scripts
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import Call, Fence, run

_CLAIM_PAUSE_S = 0.1


def await_lease(
    client: redis.Redis,
    keys: Keys,
    *,
    run_uid: Callable[[], str],
    holder: str,
    lease_s: float,
    wait_s: float,
    takeover: bool = False,
    began: float | None = None,
    give_up_after_s: float = 120.0,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Take the run's lease at once if it is free, held by this holder, or on `takeover`; else wait while `go_on()` is
    true.

    Returns whether it was taken. Refused names the holder that still renews it after `wait_s`. Ended: an operator ended
    the run since this learner `began` (`time.monotonic`; default: now). ResourceError: the name belongs to another run.
    `run_uid` is called at each try, since the run's folder may get its uid from the learner waited for; empty until
    then.
    """

    def ask() -> tuple[str, list[Any]]:  # anew after each failure: age and uid change while Redis is away
        age_ms = 0 if began is None else int(1000 * (time.monotonic() - began))
        uid = run_uid()
        args = (uid, holder, int(lease_s * 1000), int(takeover), age_ms)
        return uid, run(client, Call(scripts.TAKE_LEASE, (keys.lease, keys.meta, keys.control), args))

    def try_once() -> str | None:
        uid, reply = repeat(client, "take the run's lease", ask, give_up_after_s=give_up_after_s)
        if reply[0] == b"TAKEN":
            if uid != run_uid():  # the learner that has claimed it gave the folder its uid meanwhile
                return try_once()
            raise _name_taken(client, keys, reply)
        if reply[0] == b"ENDED":
            raise Ended(
                f"run {keys.name!r} was told to drain or stop after this learner started: start a new learner to "
                "continue it"
            )
        return other_holder(reply)

    if not wait_out(try_once, keys, wait_s, go_on=go_on):
        return False
    crashpoint("lease.taken")
    return True


def free_lease(client: redis.Redis, keys: Keys, *, holder: str, give_up_after_s: float) -> None:
    """Give the lease back if it is still this holder's, so that nobody waits for a learner that was refused."""
    call = Call(scripts.FREE_LEASE, (keys.lease,), (holder,))
    repeat(client, "free the run's lease", partial(run, client, call), give_up_after_s=give_up_after_s)


def lease_holder(client: redis.Redis, keys: Keys, *, give_up_after_s: float) -> str | None:
    """Return the learner's holder name, or None."""
    get = partial(client.get, keys.lease)
    holder: Any = repeat(client, "read the learner's lease", get, give_up_after_s=give_up_after_s)
    return None if holder is None else str(holder.decode(errors="replace"))


def known_term(client: redis.Redis, keys: Keys, run_uid: str, *, takeover: bool = False, give_up_after_s: float) -> int:
    """Return the newest term of this run in Redis, or 0.

    RunGone if the run was removed, except on `takeover`, which starts it again there.
    """

    def read() -> Any:
        return *client.hmget(keys.meta, "uid", "term"), client.get(keys.tombstone)

    uid, term, tombstone = repeat(client, "read the run's term", read, give_up_after_s=give_up_after_s)
    if tombstone == run_uid.encode() and not takeover:
        raise RunGone(
            f"run {keys.name!r} was removed from Redis at {server_name(client)}: use --takeover to continue it there "
            "from its newest checkpoint, or set another name"
        )
    return int(term) if uid == run_uid.encode() and term else 0


def wait_out(
    try_once: Callable[[], str | None], keys: Keys, wait_s: float, *, go_on: Callable[[], bool] = lambda: True
) -> bool:
    """Retry until nobody else holds the lease; `try_once` returns the holder, or None."""
    deadline = time.monotonic() + wait_s
    while (other := try_once()) is not None:
        if time.monotonic() >= deadline:
            raise Refused(
                f"run {keys.name!r} already has a learner: {other} holds its lease. Stop it, take over explicitly "
                "(--takeover), or wait until it ends (--standby)"
            )
        if not go_on():
            return False
        time.sleep(_CLAIM_PAUSE_S)
    return True


def other_holder(reply: list[Any]) -> str | None:
    return str(reply[1].decode(errors="replace")) if reply[0] == b"HELD" else None


def refusal(client: redis.Redis, keys: Keys, fence: Fence, *, what: str, reply: list[Any]) -> StreamrlError:
    """Return the error for a refused script of the learner with this fence."""
    status, *rest = reply
    name = keys.name
    match status:
        case b"FENCED":
            other = rest[0].decode(errors="replace") if rest else ""
            problem = f"the learner of term {fence.term} no longer holds run {name!r}: could not {what}"
            return Fenced(problem) if other in ("", fence.holder) else Replaced(f"{problem}, as {other} has taken over")
        case b"GONE":
            return RunGone(f"run {name!r} was removed from Redis, or another took its name: could not {what}")
        case b"TAKEN":
            return _name_taken(client, keys, reply)
        case b"STALE":
            return TransportError(f"Redis already has weights of version {int(rest[0])}: could not {what}")
        case b"UNKNOWN":
            return TransportError(f"Redis has lost the weights: could not {what}")
        case _:
            return TransportError(f"run {name!r} vanished from Redis twice while trying to {what}")


def _name_taken(client: redis.Redis, keys: Keys, reply: list[Any]) -> ResourceError:
    uid, state = (part.decode(errors="replace") for part in reply[1:])
    return ResourceError(
        f"name {keys.name!r} is taken: Redis at {server_name(client)} holds another run of that name (uid {uid}, "
        f"{state}); remove that run with `streamrl runs rm --run {keys.name}`, or set another name"
    )
