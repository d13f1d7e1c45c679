"""Causes that lie with the server, with the state of the run, or with the operator's word."""

from __future__ import annotations

from streamrl.ops.monitor.evidence import is_running, is_taken_up
from streamrl.ops.monitor.units import size
from streamrl.ops.monitor.view import Cause, View

_FULL = 0.97  # of maxmemory; close to it, large writes fail already
_TIGHT = 0.85
_MAX_SHOWN = 5  # unreadable things


def unreachable(error: str) -> Cause:
    return Cause(
        name="redis_unreachable",
        level="blocking",
        title="Redis does not answer",
        evidence=error,
        remedy="start Redis, or mend the way to it; learner and workers wait for redis.give_up_after_s and go on",
    )


def absent(view: View, *, was_removed: bool) -> Cause:
    if was_removed:
        evidence, remedy = "a tombstone lies under its name: the run was removed", "start it under another name"
    else:
        evidence = f"Redis at {view.redis.server} holds nothing of this name"
        remedy = "look for its name with `streamrl runs ls`, or start it with `streamrl up CONFIG`"
    return Cause(level="blocking", title="there is no such run", evidence=evidence, remedy=remedy)


def redis_full(view: View) -> Cause | None:
    redis = view.redis
    share = redis.used_bytes / redis.max_bytes if redis.max_bytes else 0.0
    if share < _TIGHT:
        return None
    return Cause(
        level="blocking" if share >= _FULL else "attention",
        title="Redis is full" if share >= _FULL else "Redis is nearly full",
        evidence=f"it uses {size(redis.used_bytes)} of the {size(redis.max_bytes)} that maxmemory allows ({share:.0%})",
        remedy="raise maxmemory, lower redis.max_backlog_bytes, keep weights elsewhere (weights.store), "
        "or remove other runs from this server (`streamrl runs ls` shows them)",
    )


def redis_refuses_writes(view: View) -> Cause | None:
    if not view.redis.save_error:
        return None
    return Cause(
        level="blocking",
        title="Redis cannot save, and refuses writes",
        evidence=view.redis.save_error,
        remedy="make room on the disk of Redis, or mend its folder; its log says what failed",
    )


def redis_read_only(view: View) -> Cause | None:
    if view.redis.role == "master":
        return None
    return Cause(
        level="blocking",
        title="this Redis is a replica",
        evidence=f"its role is {view.redis.role}: it takes no writes, and may lag behind",
        remedy="give the address of the master to learner and workers, or promote this one (REPLICAOF NO ONE)",
    )


def redis_evicts(view: View) -> Cause | None:
    if view.redis.policy == "noeviction" or not view.redis.max_bytes:
        return None
    return Cause(
        level="attention",
        title="Redis may throw rollouts away",
        evidence=f"maxmemory-policy is {view.redis.policy}",
        remedy="redis-cli CONFIG SET maxmemory-policy noeviction",
    )


def finished(view: View) -> Cause | None:
    if view.run.state != "finished" or is_taken_up(view):
        return None
    return Cause(
        level="info",
        title="the run has finished",
        evidence=f"{view.run.step} steps were made",
        remedy="`streamrl plot` draws its curves, `streamrl audit` accounts for its tickets",
    )


def failed(view: View) -> Cause | None:
    if view.run.state != "failed" or is_taken_up(view):
        return None
    return Cause(
        level="blocking",
        title="the learner ended with an error",
        evidence=f"after step {view.run.step}: {view.run.error or 'the run is marked as failed'}",
        remedy="mend that, then start it again: it goes on from the last checkpoint; the learner's log in the run's "
        "folder ends with the error",
    )


def stopped(view: View) -> Cause | None:
    if view.run.state != "stopped" or is_taken_up(view):
        return None
    return Cause(
        level="blocking",
        title="the run was stopped",
        evidence=f"a checkpoint was written at step {view.run.step}, and the learner left in order",
        remedy="start it again with the same configuration (`streamrl up CONFIG`): it goes on from there",
    )


def paused(view: View) -> Cause | None:
    if view.run.control != "pause" or not is_running(view):
        return None
    return Cause(
        level="blocking",
        title="an operator paused the run",
        evidence="the word in Redis is pause",
        remedy="`streamrl resume` lets it go on",
    )


def ending(view: View) -> Cause | None:
    if view.run.control not in ("drain", "stop") or not is_running(view):
        return None
    return Cause(
        level="info",
        title="the run is on its way to an end",
        evidence=f"the operator's word is {view.run.control}; {view.train.tickets} tickets are under way",
        remedy="wait for it; `streamrl resume` takes a drain back",
    )


def unreadable(view: View) -> Cause | None:
    if not view.unreadable:
        return None
    more = f", and {len(view.unreadable) - _MAX_SHOWN} more" if len(view.unreadable) > _MAX_SHOWN else ""
    return Cause(
        level="attention",
        title="something in Redis cannot be read",
        evidence="; ".join(view.unreadable[:_MAX_SHOWN]) + more + "; all else is shown without it",
        remedy="find out which other program, or version of streamrl, writes under this run's keys (redis-cli MONITOR "
        "shows it), and give it another name or a user of its own (`streamrl redis acl`)",
    )
