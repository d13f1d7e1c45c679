"""A run as Prometheus reads it: the text format, written by hand, since it is forty lines.

    streamrl_up                     Redis answers; all that follows is of the last time that it did
    streamrl_metric{name="lag/mean"} one for every metric of the last step, by its own name (telemetry.metrics)
    streamrl_*                      what a View holds: parts, streams, drops, causes

What is written here and asked for by the alert rules and the Grafana dashboard is held together by a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from streamrl.monitor.view import EXIT_CODES, View


class Family(NamedTuple):
    kind: str  # gauge or counter
    help: str
    samples: Callable[[View], Iterator[tuple[Mapping[str, str], float]]]


def _one(read: Callable[[View], float | None]) -> Callable[[View], Iterator[tuple[Mapping[str, str], float]]]:
    def samples(view: View) -> Iterator[tuple[Mapping[str, str], float]]:
        value = read(view)
        if value is not None:
            yield {}, float(value)

    return samples


def _by(
    label: str, read: Callable[[View], Mapping[str, float]]
) -> Callable[..., Iterator[tuple[dict[str, str], float]]]:
    def samples(view: View) -> Iterator[tuple[dict[str, str], float]]:
        yield from (({label: name}, float(value)) for name, value in read(view).items())

    return samples


def _lead_age(view: View) -> float | None:
    return view.learner.lead.progress_s if view.learner.lead else None


FAMILIES: Mapping[str, Family] = {
    "streamrl_health": Family(
        "gauge",
        "0 healthy, 3 degraded, 4 stalled, 5 ended: as the exit code of status",
        _one(lambda v: EXIT_CODES[v.verdict]),
    ),
    "streamrl_cause": Family(
        "gauge",
        "1: this holds the run back now (streamrl why)",
        lambda v: (({"cause": cause.name, "level": cause.level}, 1.0) for cause in v.causes),
    ),
    "streamrl_running": Family("gauge", "the run has not ended", _one(lambda v: v.run.state == "running")),
    "streamrl_step": Family("counter", "optimizer steps", _one(lambda v: v.run.step)),
    "streamrl_epoch": Family("counter", "lives of the learner", _one(lambda v: v.run.epoch)),
    "streamrl_learner_up": Family(
        "gauge", "rank 0 reports", _one(lambda v: bool(v.learner.lead and v.learner.lead.alive))
    ),
    "streamrl_learner_progress_age_seconds": Family("gauge", "since the learner got on", _one(_lead_age)),
    "streamrl_workers": Family(
        "gauge", "workers by what they do", _by("state", lambda v: Counter(w.part.state for w in v.workers))
    ),
    "streamrl_worker_tokens_per_second": Family(
        "gauge", "tokens generated", _by("worker", lambda v: {w.part.name: w.tokens_per_s or 0.0 for w in v.workers})
    ),
    "streamrl_worker_lag_steps": Family(
        "gauge",
        "steps that its weights are behind",
        _by("worker", lambda v: {w.part.name: w.lag or 0 for w in v.workers}),
    ),
    "streamrl_tickets": Family(
        "gauge", "asked for, not delivered", _by("purpose", lambda v: {s.purpose: s.tickets for s in v.streams})
    ),
    "streamrl_leased_tickets": Family(
        "gauge", "of them held by workers", _by("purpose", lambda v: {s.purpose: s.leased for s in v.streams})
    ),
    "streamrl_groups": Family(
        "gauge", "delivered, not committed", _by("purpose", lambda v: {s.purpose: s.groups for s in v.streams})
    ),
    "streamrl_group_bytes": Family(
        "gauge", "memory of those", _by("purpose", lambda v: {s.purpose: s.group_bytes for s in v.streams})
    ),
    "streamrl_oldest_lease_seconds": Family(
        "gauge", "since the oldest leased ticket was issued", _one(lambda v: v.train.oldest_s)
    ),
    "streamrl_groups_trained_total": Family("counter", "groups trained", _one(lambda v: v.drops.trained)),
    "streamrl_groups_dropped_total": Family("counter", "groups dropped", _by("reason", lambda v: v.drops.by_reason)),
    "streamrl_dead_letters": Family("gauge", "tickets given up", _one(lambda v: v.dead.count)),
    "streamrl_weights_age_seconds": Family("gauge", "since the newest version", _one(lambda v: v.weights.age_s)),
    "streamrl_workers_behind": Family("gauge", "workers with older weights", _one(lambda v: v.weights.behind)),
    "streamrl_reward_errors_total": Family(
        "counter", "errors of reward sources", _by("source", lambda v: {s.name: s.errors for s in v.rewards})
    ),
    "streamrl_reward_latency_seconds": Family(
        "gauge",
        "latency of reward sources",
        _by("source", lambda v: {s.name: s.latency_s for s in v.rewards if s.latency_s is not None}),
    ),
    "streamrl_redis_used_bytes": Family("gauge", "memory of Redis", _one(lambda v: v.redis.used_bytes)),
    "streamrl_redis_max_bytes": Family("gauge", "its limit; 0: none", _one(lambda v: v.redis.max_bytes)),
    "streamrl_metric": Family("gauge", "a metric of the last step", _by("name", lambda v: v.learner.metrics)),
}


def prometheus_text(view: View | None, run: str, *, is_up: bool) -> str:
    """Everything in Prometheus's text format, version 0.0.4."""
    lines = ["# HELP streamrl_up Redis answers", "# TYPE streamrl_up gauge"]
    lines.append(_line("streamrl_up", {"run": run}, float(is_up)))
    for name, family in FAMILIES.items() if view is not None else ():
        assert view is not None
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        lines += [_line(name, {"run": run, **labels}, value) for labels, value in family.samples(view)]
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
