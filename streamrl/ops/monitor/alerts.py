"""Alert rules for Prometheus and a dashboard for Grafana. Both use only the metrics that `exporter` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from streamrl.ops.monitor.charts import CHARTS

_RULES = "k8s/components/prometheus/rules.yaml"  # in a checkout; a wheel has a copy beside this file

Panel = tuple[str, str, Mapping[str, str]]  # title, unit, and the legend of each expression

_RUN_PANELS: tuple[Panel, ...] = (
    ("Health (0 healthy, 3 degraded, 4 stalled, 5 ended)", "short", {"streamrl_health": "health"}),
    ("What holds it back", "short", {"streamrl_cause": "{{cause}}"}),
    ("Steps", "short", {"streamrl_step": "step"}),
    ("Generated tokens/s", "short", {"sum(streamrl_worker_tokens_per_second)": "all workers"}),
    ("Workers", "short", {"streamrl_workers": "{{state}}"}),
    (
        "Tickets and groups",
        "short",
        {"streamrl_tickets": "{{purpose}} tickets", "streamrl_groups": "{{purpose}} groups"},
    ),
    ("Drops per second", "short", {"rate(streamrl_groups_dropped_total[5m])": "{{reason}}"}),
    ("Reward sources: latency", "s", {"streamrl_reward_latency_seconds": "{{source}}"}),
    ("Dead letters", "short", {"streamrl_dead_letters": "dead"}),
    ("Memory of Redis", "bytes", {"streamrl_redis_used_bytes": "used", "streamrl_group_bytes": "{{purpose}} groups"}),
    ("Steps behind, by worker", "short", {"streamrl_worker_lag_steps": "{{worker}}"}),
)
_STEP_PANELS: tuple[Panel, ...] = tuple(
    (
        chart.title,
        "s" if chart.unit == "s" else "short",
        {f'streamrl_metric{{name="{metric}"}}': label for label, metric in {**chart.series, **chart.marks}.items()}
        | {f'streamrl_metric{{name=~"{prefix}.+"}}': "{{name}}" for prefix in chart.families.values()},
    )
    for chart in CHARTS
)
_SOURCE = {"type": "prometheus", "uid": "${source}"}  # chosen on import


def alert_rules() -> dict[str, Any]:
    """Return Prometheus rules: those that the Kubernetes manifest gives to its operator."""
    installed = Path(__file__).with_name("prometheus-rules.yaml")
    manifest = installed if installed.exists() else Path(__file__).parents[3] / _RULES
    rules: dict[str, Any] = yaml.safe_load(manifest.read_text(encoding="utf-8"))["spec"]
    return rules


def grafana_dashboard() -> dict[str, Any]:
    """Return a dashboard to import as it is; it asks for a Prometheus data source, and lets the user choose the run."""
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
                {"name": "run", "type": "query", "datasource": _SOURCE, "query": "label_values(streamrl_up, run)"},
            ]
        },
        "panels": [_panel(place, *panel) for place, panel in enumerate((*_RUN_PANELS, *_STEP_PANELS))],
    }


def _panel(place: int, title: str, unit: str, legends: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": 12 * (place % 2), "y": 8 * (place // 2), "w": 12, "h": 8},  # two per row of 24 columns
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": _for_chosen_run(expr), "legendFormat": legend, "datasource": _SOURCE}
            for at, (expr, legend) in enumerate(legends.items())
        ],
    }


def _for_chosen_run(expr: str) -> str:
    """Restrict the expression to the chosen run."""
    if "{" in expr:
        return expr.replace("{", '{run="$run",')
    return re.sub(r"streamrl_\w+", r'\g<0>{run="$run"}', expr)
