"""What holds a run back now: a table of causes, each with its evidence and its remedy, in the order in which they
explain each other.

A full server explains why nobody works, a pause why nobody should: what stands further up is looked at first. Each
cause is one pure function of a `View`; all that apply are told, the blocking ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from streamrl.ops.monitor import flow_causes as flow
from streamrl.ops.monitor import part_causes as parts
from streamrl.ops.monitor import state_causes as state
from streamrl.ops.monitor.evidence import is_taken_up
from streamrl.ops.monitor.view import Cause, Level, Verdict, View

TABLE: Mapping[str, Callable[[View], Cause | None]] = {
    "redis_full": state.redis_full,
    "redis_refuses_writes": state.redis_refuses_writes,
    "redis_read_only": state.redis_read_only,
    "redis_evicts": state.redis_evicts,
    "finished": state.finished,
    "failed": state.failed,
    "stopped": state.stopped,
    "paused": state.paused,
    "ending": state.ending,
    "learner_gone": parts.learner_gone,
    "learner_restarting": parts.learner_restarting,
    "lease_held": parts.lease_held,
    "learner_starting": parts.learner_starting,
    "learner_without_redis": parts.learner_without_redis,
    "publish_stuck": parts.publish_stuck,
    "learner_stuck": parts.learner_stuck,
    "no_workers": parts.no_workers,
    "all_workers_reject": parts.all_workers_reject,
    "reward_outage": flow.reward_outage,
    "workers_starting": parts.workers_starting,
    "workers_without_weights": parts.workers_without_weights,
    "workers_stuck": parts.workers_stuck,
    "byte_budget_reached": flow.byte_budget_reached,
    "all_groups_dropped": flow.all_groups_dropped,
    "poison_ticket": flow.poison_ticket,
    "failing_tickets": flow.failing_tickets,
    "stragglers": flow.stragglers,
    "lag_bound_reached": flow.lag_bound_reached,
    "generation_is_slow": flow.generation_is_slow,
    "evaluating": flow.evaluating,
    "most_groups_dropped": flow.most_groups_dropped,
    "some_workers_reject": parts.some_workers_reject,
    "weights_behind": parts.weights_behind,
    "engine_disagrees": flow.engine_disagrees,
    "workers_silent": parts.workers_silent,
    "dead_letters": flow.dead_letters,
    "steps_skipped": flow.steps_skipped,
    "unreadable": state.unreadable,
}

_LEVELS: tuple[Level, ...] = ("blocking", "attention", "info")


def find_causes(view: View, *, was_removed: bool = False) -> tuple[Cause, ...]:
    looks: Mapping[str, Callable[[View], Cause | None]]
    if view.run.state == "absent":
        looks = {"absent": lambda view: state.absent(view, was_removed=was_removed), "unreadable": state.unreadable}
    else:
        looks = TABLE
    found = [replace(cause, name=name) for name, look in looks.items() if (cause := look(view)) is not None]
    return tuple(sorted(found, key=lambda cause: _LEVELS.index(cause.level)))


def judge(view: View, causes: tuple[Cause, ...]) -> Verdict:
    """healthy: it runs, or has reached its end. degraded: it runs, and somebody should look. stalled: nothing moves.
    ended: it was stopped, has failed, or is not there."""
    if view.run.state == "absent":
        return "ended"
    if not is_taken_up(view):
        if view.run.state in ("stopped", "failed"):
            return "ended"
        if view.run.state == "finished":
            return "healthy"
    levels = {cause.level for cause in causes}
    return "stalled" if "blocking" in levels else "degraded" if "attention" in levels else "healthy"
