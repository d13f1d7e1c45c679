"""What holds a run back now: a table of causes, each with its evidence and its remedy, in the order in which they
explain each other.

A full server explains why nobody works, a pause why nobody should: what stands further up is looked at first. Each
cause is one pure function of a `View`; all that apply are told, the blocking ones first.
"""

from __future__ import annotations

from collections.abc import Callable

from streamrl.monitor.causes import flow, parts, state
from streamrl.monitor.view import Cause, Level, Verdict, View

TABLE: tuple[Callable[[View], Cause | None], ...] = (
    state.redis_full,
    state.redis_refuses_writes,
    state.redis_read_only,
    state.redis_evicts,
    state.finished,
    state.failed,
    state.stopped,
    state.paused,
    state.ending,
    parts.learner_gone,
    parts.learner_restarting,
    parts.lease_held,
    parts.learner_starting,
    parts.learner_without_redis,
    parts.publish_stuck,
    parts.learner_stuck,
    parts.no_workers,
    flow.reward_outage,
    parts.workers_starting,
    parts.workers_without_weights,
    parts.workers_stuck,
    flow.byte_budget_reached,
    flow.all_groups_dropped,
    flow.poison_ticket,
    flow.failing_tickets,
    flow.stragglers,
    flow.lag_bound_reached,
    flow.generation_is_slow,
    flow.evaluating,
    flow.most_groups_dropped,
    parts.weights_behind,
    parts.some_workers_silent,
    flow.dead_letters,
    flow.steps_skipped,
)

_LEVELS: tuple[Level, ...] = ("blocking", "attention", "info")


def find_causes(view: View, *, was_removed: bool = False) -> tuple[Cause, ...]:
    if view.run.state == "absent":
        return (state.absent(view, was_removed=was_removed),)
    found = [cause for look in TABLE if (cause := look(view)) is not None]
    return tuple(sorted(found, key=lambda cause: _LEVELS.index(cause.level)))


def judge(view: View, causes: tuple[Cause, ...]) -> Verdict:
    """healthy: it runs, or has reached its end. degraded: it runs, and somebody should look. stalled: nothing moves.
    ended: it was stopped, has failed, or is not there."""
    if view.run.state in ("stopped", "failed", "absent"):
        return "ended"
    if view.run.state == "finished":
        return "healthy"
    levels = {cause.level for cause in causes}
    return "stalled" if "blocking" in levels else "degraded" if "attention" in levels else "healthy"
