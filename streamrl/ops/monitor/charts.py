"""What is drawn of a run, in one table for the PNG report, the page and Grafana; and the report.

The report is one PNG of all curves that have a chart, or of those of a demonstration. matplotlib is loaded here alone,
and only for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.extras import need
from streamrl.ops.monitor.history import History
from streamrl.protocol.transport.keys import is_validation
from streamrl.telemetry.metrics import OF_LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _SHAPE = 10.4, 0.52  # inches, of the whole; height of a chart, as a share of its width
_SMOOTHING = 0.04  # of the steps: the window of the running mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    name: str
    title: str
    unit: str
    series: Mapping[str, str]  # label -> metric
    is_stacked: bool = False  # the series are shares of one whole


CHARTS = (
    Chart(
        name="reward",
        title="Reward",
        unit="",
        series={"trained": "train_rollouts/rewards", "held out": "val_rollouts/rewards"},
    ),
    Chart(name="kl", title="KL to the reference", unit="nats", series={"KL": "train_rollouts/init_policy_kl"}),
    Chart(
        name="lag",
        title="Lag of trained tokens",
        unit="steps",
        series={"mean": "lag/mean", "largest": "lag/max", "in flight": "lag/in_flight"},
    ),
    Chart(
        name="throughput",
        title="Trained tokens per second",
        unit="tokens/s",
        series={"tokens/s": "throughput/tokens_per_s"},
    ),
    Chart(
        name="time",
        title="Where a step's time goes",
        unit="s",
        series={
            "waits for groups": "timers/rollout",
            "trains": "timers/train",
            "publishes": "timers/publish",
            "checkpoints": "timers/checkpoint",
        },
        is_stacked=True,
    ),
    Chart(
        name="correction",
        title="Off-policy correction",
        unit="",
        series={"mean ratio": "policy/ratio_mean", "effective samples": "policy/ess"},
    ),
    Chart(
        name="fresh",
        title="Engine against learner, on fresh samples",
        unit="nats",
        series={"mean difference": "policy/fresh_mismatch", "KL": "policy/fresh_mismatch_kl"},
    ),
    Chart(
        name="loss",
        title="Loss and gradient",
        unit="",
        series={"loss": "train_optim/loss", "gradient": "train_optim/grad_norm"},
    ),
    Chart(
        name="length",
        title="Response length",
        unit="tokens",
        series={"trained": "train_rollouts/response_lengths", "held out": "val_rollouts/response_lengths"},
    ),
)


def charts_of(history: History) -> tuple[Chart, ...]:
    """With a chart of what the run's loss tells of itself, if it tells anything."""
    newest = history.steps.records[-1].values if history.steps.records else {}
    own = {name.removeprefix(OF_LOSS): name for name in sorted(newest) if name.startswith(OF_LOSS)}
    return (*CHARTS, Chart(name="own", title="What the loss tells", unit="", series=own)) if own else CHARTS


def save_report(path: Path, history: History, *, title: str, charts: Sequence[Chart] | None = None) -> None:
    need("a plot", "matplotlib", extra="monitor")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = charts_of(history) if charts is None else charts
    num_columns = min(2, len(charts))
    num_rows = -(-len(charts) // num_columns)
    height = num_rows * _SHAPE * _WIDTH / num_columns
    figure = Figure(figsize=(_WIDTH, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for chart, axes in zip(charts, figure.subplots(num_rows, num_columns, squeeze=False).flat, strict=False):
        _draw(chart, history, axes)
    figure.savefig(path)


def _draw(chart: Chart, history: History, axes: Axes) -> None:
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    if chart.is_stacked:
        _draw_stacked(chart, history, axes)
    else:
        for label, metric in chart.series.items():
            is_held_out = is_validation([metric])
            steps, values = history.curve(metric)
            if not steps:
                continue
            if is_held_out or len(steps) < 50:
                axes.plot(steps, values, label=label, marker="o" if is_held_out else None, markersize=3, linewidth=1.2)
            else:
                [line] = axes.plot(steps, values, linewidth=0.6, alpha=0.35)
                axes.plot(steps, running_mean(values), label=label, color=line.get_color(), linewidth=1.4)
    if axes.has_data():
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", va="center", transform=axes.transAxes, fontsize=8)


def _draw_stacked(chart: Chart, history: History, axes: Axes) -> None:
    records = [r for r in history.steps.records if any(metric in r.values for metric in chart.series.values())]
    if records:
        layers = [[record.values.get(metric, 0.0) for record in records] for metric in chart.series.values()]
        axes.stackplot([record.step for record in records], layers, labels=list(chart.series), alpha=0.8)


def running_mean(values: list[float]) -> list[float]:
    """Each value replaced by the mean of those around it."""
    half = max(1, round(len(values) * _SMOOTHING / 2))
    sums = list(accumulate(values, initial=0.0))
    bounds = ((max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values)))
    return [(sums[end] - sums[start]) / (end - start) for start, end in bounds]
