"""Alert rules for Prometheus and a dashboard for Grafana, as data. Both ask only for what `exporter` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Alert(NamedTuple):
    expr: str
    for_: str
    severity: str
    summary: str


_NOT_PAUSED = 'unless on(run) streamrl_cause{cause="paused"} == 1'  # nobody is woken for what an operator wants
ALERTS: Mapping[str, Alert] = {
    "StreamrlRedisGone": Alert("streamrl_up == 0", "1m", "critical", "Redis of run {{ $labels.run }} does not answer"),
    "StreamrlStalled": Alert(
        f"streamrl_health == 4 {_NOT_PAUSED}",
        "5m",
        "critical",
        "Run {{ $labels.run }} stands still; `streamrl why` says what holds it",
    ),
    "StreamrlNoProgress": Alert(
        f"streamrl_running == 1 and on(run) streamrl_learner_progress_age_seconds > 900 {_NOT_PAUSED}",
        "1m",
        "critical",
        "The learner of run {{ $labels.run }} has not got on for 15 minutes",
    ),
    "StreamrlLearnerGone": Alert(
        "streamrl_running == 1 and on(run) streamrl_learner_up == 0",
        "3m",
        "critical",
        "The learner of run {{ $labels.run }} is gone",
    ),
    "StreamrlNoWorkers": Alert(
        'streamrl_running == 1 and on(run) streamrl_cause{cause="no_workers"} == 1',
        "3m",
        "critical",
        "Run {{ $labels.run }} has no workers",
    ),
    "StreamrlAllWorkersReject": Alert(
        'streamrl_running == 1 and on(run) streamrl_cause{cause="all_workers_reject"} == 1',
        "1m",  # in three the run ends
        "critical",
        "All workers of run {{ $labels.run }} reject its weights; `streamrl why` says by how much they are off",
    ),
    "StreamrlSomeWorkersReject": Alert(
        'streamrl_running == 1 and on(run) streamrl_cause{cause="some_workers_reject"} == 1',
        "5m",
        "warning",
        "Some workers of run {{ $labels.run }} reject its weights and deliver nothing; `streamrl why` names them",
    ),
    "StreamrlFailed": Alert(
        'streamrl_cause{cause="failed"} == 1',
        "0m",
        "critical",
        "Run {{ $labels.run }} has ended with an error; `streamrl why` says with which",
    ),
    "StreamrlLag": Alert(
        'streamrl_metric{name="lag/mean"} > 16',
        "15m",
        "warning",
        "Tokens of run {{ $labels.run }} are {{ $value }} steps old",
    ),
    "StreamrlEngineDisagrees": Alert(
        'streamrl_running == 1 and on(run) streamrl_cause{cause="engine_disagrees"} == 1',
        "15m",
        "warning",
        "Engines of run {{ $labels.run }} give other log-probs than the learner, on samples of the same weights",
    ),
    "StreamrlDrops": Alert(
        "sum by (run) (rate(streamrl_groups_dropped_total[15m]))"
        " > 3 * sum by (run) (rate(streamrl_groups_trained_total[15m]))",
        "15m",
        "warning",
        "Run {{ $labels.run }} drops over three quarters of its groups",
    ),
    "StreamrlDeadLetters": Alert(
        "delta(streamrl_dead_letters[15m]) > 0", "0m", "warning", "Run {{ $labels.run }} has given up tickets"
    ),
    "StreamrlRedisFull": Alert(
        "streamrl_redis_max_bytes > 0 and on(run) streamrl_redis_used_bytes / streamrl_redis_max_bytes > 0.85",
        "5m",
        "warning",
        "Redis of run {{ $labels.run }} is nearly full",
    ),
}

_PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Health (0 healthy, 3 degraded, 4 stalled, 5 ended)", "short", (("streamrl_health", "health"),)),
    ("What holds it back", "short", (("streamrl_cause", "{{cause}}"),)),
    ("Steps", "short", (("streamrl_step", "step"),)),
    ("Reward", "short", (('streamrl_metric{name=~"train_rollouts/rewards"}', "trained"),)),
    ("KL to the reference", "short", (('streamrl_metric{name="train_rollouts/init_policy_kl"}', "KL"),)),
    ("Lag of trained tokens", "short", (('streamrl_metric{name=~"lag/(mean|max)"}', "{{name}}"),)),
    (
        "Engine against learner, on fresh samples",
        "short",
        (('streamrl_metric{name="policy/fresh_mismatch"}', "mean difference"),),
    ),
    ("Generated tokens/s", "short", (("sum(streamrl_worker_tokens_per_second)", "all workers"),)),
    ("Trained tokens/s", "short", (('streamrl_metric{name="throughput/tokens_per_s"}', "trained"),)),
    ("Workers", "short", (("streamrl_workers", "{{state}}"),)),
    (
        "Tickets and groups",
        "short",
        (("streamrl_tickets", "{{purpose}} tickets"), ("streamrl_groups", "{{purpose}} groups")),
    ),
    ("Drops per second", "short", (("rate(streamrl_groups_dropped_total[5m])", "{{reason}}"),)),
    ("Where a step's time goes", "s", (('streamrl_metric{name=~"timers/.*"}', "{{name}}"),)),
    ("Reward sources: latency", "s", (("streamrl_reward_latency_seconds", "{{source}}"),)),
    ("Dead letters", "short", (("streamrl_dead_letters", "dead"),)),
    (
        "Memory of Redis",
        "bytes",
        (("streamrl_redis_used_bytes", "used"), ("streamrl_group_bytes", "{{purpose}} groups")),
    ),
    ("Steps behind, by worker", "short", (("streamrl_worker_lag_steps", "{{worker}}"),)),
)
_PANEL_WIDTH, _PANEL_HEIGHT, _GRID = 12, 8, 24


def alert_rules() -> dict[str, Any]:
    """A rule file of Prometheus, as YAML would hold it."""
    rules = [
        {
            "alert": name,
            "expr": alert.expr,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for name, alert in ALERTS.items()
    ]
    return {"groups": [{"name": "streamrl", "rules": rules}]}


def grafana_dashboard() -> dict[str, Any]:
    """To be imported as it is; it asks for a Prometheus data source, and lets the run be chosen."""
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "streamrl",
        "uid": "streamrl",
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {"name": "run", "type": "query", "datasource": source, "query": "label_values(streamrl_up, run)"},
            ]
        },
        "panels": [_panel(place, *panel, source=source) for place, panel in enumerate(_PANELS)],
    }


def _panel(
    place: int, title: str, unit: str, targets: tuple[tuple[str, str], ...], *, source: Mapping[str, str]
) -> dict[str, Any]:
    across = _GRID // _PANEL_WIDTH
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {
            "x": place % across * _PANEL_WIDTH,
            "y": place // across * _PANEL_HEIGHT,
            "w": _PANEL_WIDTH,
            "h": _PANEL_HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": _of_the_run(expr), "legendFormat": legend, "datasource": source}
            for at, (expr, legend) in enumerate(targets)
        ],
    }


def _of_the_run(expr: str) -> str:
    """The same, of the run that was chosen."""
    start = expr.index("streamrl_")
    end = next((at for at in range(start, len(expr)) if not (expr[at].isalnum() or expr[at] == "_")), len(expr))
    name, rest = expr[start:end], expr[end:]
    chosen = 'run="$run"'
    return expr[:start] + (f"{name}{{{chosen},{rest[1:]}" if rest.startswith("{") else f"{name}{{{chosen}}}{rest}")
