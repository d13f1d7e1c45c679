"""Causes in rewards and environments: sources that do not answer, environments that fail or are slow."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from streamrl.ops.monitor.evidence import alive, lead_waiting, room_for_more, waiting_for, waits_long
from streamrl.ops.monitor.fields import number
from streamrl.ops.monitor.view import Cause, View, WorkerStatus
from streamrl.telemetry.progress import Wait
from streamrl.terminal import age, plural

_OF_ENVIRONMENT = "rewards/environment/"
_ENOUGH_FAILED, _MANY_FAILED = 8, 0.2  # rollouts, and their share: a few are any environment's
_SLOW_REWARD_S = 5.0  # until a group has its rewards
_MANY_WAIT, _SLOW_EPISODE_S = 0.5, 5.0  # of the rollouts under way; the oldest, for how long


def reward_outage(view: View) -> Iterator[Cause]:
    """A reward source is out, or workers wait for rewards."""
    workers = alive(view)
    waiting = waiting_for(view, Wait.REWARDS)
    broken = [source for source in view.rewards if source.state not in (None, "well")]
    if waiting or broken:
        evidence = [f"{s.name}: {s.state}, {plural(s.errors, 'error')}" for s in broken]
        if waiting:
            longest = max(worker.part.doing_s for worker in waiting)
            evidence.append(f"{len(waiting)} of {len(workers)} workers wait for rewards, for up to {age(longest)}")
        yield Cause(
            level="blocking" if waiting and len(waiting) == len(workers) else "attention",
            title="a reward source does not answer",
            evidence="; ".join(evidence),
            remedy="start or fix the service named above (ask a reward server with GET /health; for a judge check "
            "key, model and token_budget); workers that wait continue by themselves",
        )


def environment_fails(view: View) -> Iterator[Cause]:
    """The environment raises errors, its processes die, or its answers are late."""
    stats = _environment_stats(view)
    # Of each worker's last rollouts: an outage that is over counts no more.
    ended, failed = (
        round(sum(numbers.get(f"{name}_lately", 0.0) for _, numbers in stats)) for name in ("ended", "failed")
    )
    if failed < _ENOUGH_FAILED or failed < _MANY_FAILED * ended:
        return
    errors = [str(worker.detail.get(f"{_OF_ENVIRONMENT}error", "")) for worker, _ in stats]
    last = next((f"; the last one: {error}" for error in errors if error), "")
    yield Cause(
        level="attention" if failed < ended else "blocking",
        title="the environment fails rollouts",
        evidence=f"{failed} of the last {ended}{last}",
        remedy="fix that error; `streamrl doctor CONFIG` plays the environment on your rows. A call that hangs is "
        "given up after environment.timeout_s; a process that dies takes its rollouts with it",
    )


def environment_is_slow(view: View) -> Iterator[Cause]:
    """The learner waits for groups, and most rollouts wait for their environment."""
    part = lead_waiting(view, Wait.GROUPS)
    active = [(worker, numbers) for worker, numbers in _environment_stats(view) if numbers.get("under_way")]
    if part is None or not active:
        return
    under_way = round(sum(numbers["under_way"] for _, numbers in active))
    in_model = min(under_way, sum(worker.in_flight or 0 for worker, _ in active))
    environment_s, model_s = (
        median(numbers.get(name, 0.0) for _, numbers in active) for name in ("latency_s", "model_s")
    )
    oldest = max(numbers.get("oldest_s", 0.0) for _, numbers in active)
    if under_way - in_model < _MANY_WAIT * under_way or oldest < _SLOW_EPISODE_S:
        return
    yield Cause(
        level="attention" if waits_long(view, part) else "info",
        title="rollouts wait for their environment",
        evidence=f"{under_way - in_model} of {plural(under_way, 'rollout')} in flight, the oldest for {age(oldest)}; "
        f"a finished one spent {environment_s:.1f} s in the environment and {model_s:.1f} s in the model",
        remedy="raise worker.max_groups_in_flight, so that other rollouts keep the engine busy; raise "
        "environment.processes if the environment computes, or add replicas if it is a service; "
        "environment.timeout_s limits calls that hang",
    )


def rewards_are_slow(view: View) -> Iterator[Cause]:
    """The learner waits for groups, and most of the time that these take is spent on their scores."""
    part, took = lead_waiting(view, Wait.GROUPS), view.learner.metrics
    holders = [worker for worker in alive(view) if worker.leases and not worker.rejected]
    sources = [source for source in view.rewards if source.latency_s and source.name != "environment"]
    if part is None or not view.train.leased or not holders or not sources or any(environment_is_slow(view)):
        return
    slowest = max(sources, key=lambda source: source.latency_s or 0.0)
    generate_s = took.get("timers/generate", 0.0)
    reward_s = took.get("timers/reward", slowest.latency_s or 0.0)
    # Samples that queue for an engine show that it is busy, whatever becomes of them later.
    if reward_s < max(_SLOW_REWARD_S, generate_s) or any(number(worker.detail, "waiting") for worker in holders):
        return
    yield Cause(
        level="attention" if waits_long(view, part) else "info",
        title="groups wait for their rewards",
        evidence=f"for {age(part.doing_s)}; a group takes {generate_s:.1f} s to generate and {reward_s:.1f} s to "
        f"score; the slowest source, {slowest.name}, takes {slowest.latency_s:.1f} s for a sample",
        remedy="give that source more processes, replicas or a larger max_concurrency; or let more samples wait for it "
        f"at once: {room_for_more(view)}",
    )


def _environment_stats(view: View) -> list[tuple[WorkerStatus, dict[str, float]]]:
    """Return the environment's statistics by worker, as numbers."""
    stats = []
    for worker in alive(view):
        numbers = {
            name.removeprefix(_OF_ENVIRONMENT): float(value)
            for name, value in worker.detail.items()
            if name.startswith(_OF_ENVIRONMENT) and not isinstance(value, str)
        }
        stats += [(worker, numbers)] if numbers else []
    return stats
