"""What holds a run back now: a table of causes, each with its evidence and its remedy. Causes that explain others
come first: a full server explains why nobody works, a pause why nobody should.

Each cause is one pure function of a `View`, which yields a `Cause` if it applies. All that apply are reported, the
blocking ones first. This module has the causes in Redis, in the state of the run, and in operators' commands; those in
learner and workers are in `part_causes`, the others in `flow_causes`, `drop_causes` and `reward_causes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from streamrl.ops.monitor import drop_causes as drops
from streamrl.ops.monitor import flow_causes as flow
from streamrl.ops.monitor import part_causes as parts
from streamrl.ops.monitor import reward_causes as rewards
from streamrl.ops.monitor.bounds import bound_of
from streamrl.ops.monitor.evidence import is_running, is_taken_up
from streamrl.ops.monitor.view import Cause, Level, Verdict, View, attention, blocking, info
from streamrl.terminal import age, size

_FULL = 0.97  # of maxmemory; close to it, large writes already fail
_TIGHT = 0.85
_MAX_SHOWN = 5  # unreadable entries


def unreachable(error: str) -> Cause:
    return blocking(
        name="redis_unreachable",
        title="Redis does not answer",
        evidence=error,
        remedy="start Redis, or fix the network, the address or the password; learner and workers wait for it "
        "(redis.give_up_after_s) and then continue",
    )


def absent(view: View, *, was_removed: bool) -> Iterator[Cause]:
    if was_removed:
        evidence, remedy = "it was removed, and its name is marked as removed", "start it under another name"
    else:
        evidence = f"Redis at {view.redis.server} holds nothing under this name"
        remedy = "list the runs with `streamrl runs ls`, or start this one with `streamrl up CONFIG`"
    yield blocking(title="there is no such run", evidence=evidence, remedy=remedy)


def not_begun(view: View) -> Iterator[Cause]:
    yield blocking(
        title="the run has not started",
        evidence=view.run.error
        or f"no learner has started it: {view.run.folder} holds little besides its configuration",
        remedy=f"start it with the last requested configuration: `streamrl up {view.run.folder}/config.yaml`",
    )


def redis_full(view: View) -> Iterator[Cause]:
    redis = view.redis
    share = redis.used_bytes / redis.max_bytes if redis.max_bytes else 0.0
    if share >= _TIGHT:
        yield Cause(
            level="blocking" if share >= _FULL else "attention",
            title="Redis is full" if share >= _FULL else "Redis is nearly full",
            evidence=f"it uses {size(redis.used_bytes)} of the {size(redis.max_bytes)} that maxmemory allows "
            f"({share:.0%})",
            remedy="raise maxmemory, lower redis.max_backlog_bytes, store weights elsewhere (weights.store), "
            "or remove other runs from this server (`streamrl runs ls` lists them)",
        )


def redis_refuses_writes(view: View) -> Iterator[Cause]:
    if view.redis.save_error:
        yield blocking(
            title="Redis cannot save to disk and refuses writes",
            evidence=view.redis.save_error,
            remedy="free space on Redis' disk, or fix the permissions of its folder; Redis' log says what failed",
        )


def redis_read_only(view: View) -> Iterator[Cause]:
    if view.redis.role != "master":
        yield blocking(
            title="this Redis is a replica",
            evidence=f"its role is {view.redis.role}: it accepts no writes and may lag behind the master",
            remedy="give learner and workers the master's address, or promote this one (REPLICAOF NO ONE)",
        )


def redis_evicts(view: View) -> Iterator[Cause]:
    if view.redis.policy != "noeviction" and view.redis.max_bytes:
        yield attention(
            title="Redis may evict rollouts",
            evidence=f"maxmemory-policy is {view.redis.policy}",
            remedy="run redis-cli CONFIG SET maxmemory-policy noeviction, or set it in a managed service's parameters",
        )


def finished(view: View) -> Iterator[Cause]:
    if view.run.state == "finished" and not is_taken_up(view):
        yield info(
            title="the run has finished",
            evidence=f"it made {view.run.step} steps",
            remedy="nothing to fix; `streamrl plot` draws its curves, `streamrl groups tail` shows rollouts, "
            f"`streamrl audit` accounts for its tickets; raise {bound_of(view.run.max_steps, step=view.run.step)} to "
            "continue it",
        )


def failed(view: View) -> Iterator[Cause]:
    if view.run.state == "failed" and not is_taken_up(view):
        yield blocking(
            title="the learner ended with an error",
            evidence=f"after step {view.run.step}: {view.run.error or 'the run is marked as failed'}",
            remedy="fix the error, then start the run again: it resumes from the last checkpoint; the full error is at "
            "the end of the learner's log in the run's folder",
        )


def stopped(view: View) -> Iterator[Cause]:
    if view.run.state == "stopped" and not is_taken_up(view):
        yield blocking(
            title="the run was stopped",
            evidence=f"the learner wrote a checkpoint at step {view.run.step} and exited cleanly"
            + (f"; it was told to, because {view.run.error}" if view.run.error else ""),
            remedy="start it again with the same configuration (`streamrl up CONFIG`): it resumes from there",
        )


def crashed(view: View) -> Iterator[Cause]:
    if view.run.state == "crashed":
        yield blocking(
            title="the run crashed",
            evidence=f"it was running at step {view.run.step} and last reported {age(_since_end_s(view))} ago; "
            f"neither its learner nor its Redis is running{f': {view.run.error}' if view.run.error else ''}",
            remedy=f"look for the reason in {view.run.folder}/logs; start it again with the same configuration "
            "(`streamrl up CONFIG`): it resumes from the last checkpoint",
        )


def _since_end_s(view: View) -> float | None:
    return None if view.run.ended_at is None else view.at - view.run.ended_at


def paused(view: View) -> Iterator[Cause]:
    if view.run.control == "pause" and is_running(view):
        yield blocking(
            title="an operator paused the run",
            evidence="the operator's last command is pause",
            remedy="continue it with `streamrl resume`",
        )


def ending(view: View) -> Iterator[Cause]:
    if view.run.control in ("drain", "stop") and is_running(view):
        yield info(
            title="the run is ending",
            evidence=f"the operator's last command is {view.run.control}; {view.train.tickets} tickets are open",
            remedy="wait until it has ended; `streamrl resume` cancels a drain",
        )


def unreadable(view: View) -> Iterator[Cause]:
    if view.unreadable:
        more = f", and {len(view.unreadable) - _MAX_SHOWN} more" if len(view.unreadable) > _MAX_SHOWN else ""
        yield attention(
            title="something in Redis cannot be read",
            evidence="; ".join(view.unreadable[:_MAX_SHOWN]) + more + "; everything else is shown",
            remedy="find the program, or version of streamrl, that writes under this run's keys (redis-cli "
            "MONITOR shows it), and give it another name or its own user (`streamrl redis acl`)",
        )


TABLE: Mapping[str, Callable[[View], Iterator[Cause]]] = {
    "redis_full": redis_full,
    "redis_refuses_writes": redis_refuses_writes,
    "redis_read_only": redis_read_only,
    "redis_evicts": redis_evicts,
    "finished": finished,
    "failed": failed,
    "stopped": stopped,
    "crashed": crashed,
    "paused": paused,
    "ending": ending,
    "learner_gone": parts.learner_gone,
    "learner_restarting": parts.learner_restarting,
    "lease_held": parts.lease_held,
    "learner_starting": parts.learner_starting,
    "publish_stuck": parts.publish_stuck,
    "learner_stuck": parts.learner_stuck,
    "saving": parts.saving,
    "no_workers": parts.no_workers,
    "all_workers_reject": parts.all_workers_reject,
    "reward_outage": rewards.reward_outage,
    "environment_fails": rewards.environment_fails,
    "workers_starting": parts.workers_starting,
    "workers_without_hosts": parts.workers_without_hosts,
    "workers_without_weights": parts.workers_without_weights,
    "workers_stuck": parts.workers_stuck,
    "checkpoints_refused": parts.checkpoints_refused,  # why the budget may be used up
    "byte_budget_reached": flow.byte_budget_reached,
    "draws_refused": flow.draws_refused,
    "all_groups_dropped": drops.all_groups_dropped,
    "poison_ticket": drops.poison_ticket,
    "failing_tickets": drops.failing_tickets,
    "stragglers": flow.stragglers,
    "lag_bound_reached": flow.lag_bound_reached,
    "environment_is_slow": rewards.environment_is_slow,
    "rewards_are_slow": rewards.rewards_are_slow,
    "generation_is_slow": flow.generation_is_slow,
    "evaluating": flow.evaluating,
    "most_groups_dropped": drops.most_groups_dropped,
    "few_prompts_fit": drops.few_prompts_fit,
    "some_workers_reject": parts.some_workers_reject,
    "peer_lied": parts.peer_lied,
    "weights_behind": parts.weights_behind,
    "engine_disagrees": flow.engine_disagrees,
    "validation_ranks_nothing": flow.validation_ranks_nothing,
    "workers_silent": parts.workers_silent,
    "dead_letters": drops.dead_letters,
    "steps_skipped": flow.steps_skipped,
    "unreadable": unreadable,
}

_LEVELS: tuple[Level, ...] = ("blocking", "attention", "info")


def find_causes(view: View, *, was_removed: bool = False) -> tuple[Cause, ...]:
    checks = TABLE
    if view.run.state == "absent":
        checks = {"absent": partial(absent, was_removed=was_removed), "unreadable": unreadable}
        if is_taken_up(view):
            checks = {name: TABLE[name] for name in ("learner_starting", "unreadable")}
        if view.run.folder is not None:
            checks = {"not_begun": not_begun}
    found = [replace(cause, name=name) for name, check in checks.items() for cause in check(view)]
    return tuple(sorted(found, key=lambda cause: _LEVELS.index(cause.level)))


def judge(view: View, causes: tuple[Cause, ...]) -> Verdict:
    """Return the verdict. healthy: it runs, or has finished. degraded: it runs, and needs attention. stalled: nothing
    moves. ended: it was stopped, has failed or crashed, or does not exist."""
    if view.run.state in ("absent", "stopped", "failed", "crashed") and not is_taken_up(view):
        return "ended"
    if view.run.state == "finished" and not is_taken_up(view):
        return "healthy"
    levels = {cause.level for cause in causes}
    return "stalled" if "blocking" in levels else "degraded" if "attention" in levels else "healthy"
