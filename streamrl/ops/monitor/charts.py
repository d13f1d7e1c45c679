"""The charts of a run, in one table for the PNG report, the web page and Grafana; and the report itself.

The report is one PNG of all charts with data, or of those of a demonstration. Only this module imports matplotlib, and
only for the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.extras import need
from streamrl.ops.monitor.history import History, thin
from streamrl.protocol.transport.keys import is_validation
from streamrl.telemetry.metrics import OF_LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _SHAPE = 10.4, 0.52  # total width in inches; height of a chart relative to its width
_SMOOTHING = 0.04  # window of the running mean, as a share of the steps
_RECENT_RECORDS = 50  # records searched for the members of a family


Points = Sequence[tuple[int, float]]  # (step, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    name: str
    title: str
    unit: str
    series: Mapping[str, str] = field(default_factory=dict)  # label -> metric
    is_stacked: bool = False  # the series are shares of one whole
    marks: Mapping[str, str] = field(default_factory=dict)  # label -> metric, for occasional events
    # Label prefix -> metric prefix, for metrics whose names depend on the run; each match is a further series.
    families: Mapping[str, str] = field(default_factory=dict)
    min_members: int = 1  # of a family in a run, for the chart to be shown


CHARTS = (
    Chart(
        name="reward",
        title="Reward",
        unit="",
        series={
            "all groups": "all_rollouts/rewards",
            "trained": "train_rollouts/rewards",
            "held out": "val_rollouts/rewards",
        },
    ),
    Chart(
        name="sources",
        title="Reward by source",
        unit="",
        families={"": "train_rollouts/rewards/", "held out, ": "val_rollouts/rewards/"},
        min_members=2,
    ),
    Chart(
        name="datasets",
        title="Reward by dataset (all groups)",
        unit="",
        families={"": "all_rollouts/rewards_by_dataset/", "held out, ": "val_rollouts/rewards_by_dataset/"},
    ),
    Chart(
        name="passing",
        title="Held-out prompts that pass",
        unit="share",
        series={"majority": "val_rollouts/majority"},
        families={"pass@": "val_rollouts/pass_at/", "": "val_rollouts/pass_at_by_dataset/"},
    ),
    Chart(
        name="curriculum",
        title="Prompts in the curriculum",
        unit="prompts",
        families={"": "curriculum/prompts/"},
    ),
    Chart(name="kl", title="KL to the reference", unit="nats", series={"KL": "train_rollouts/init_policy_kl"}),
    Chart(name="entropy", title="Entropy of the next token", unit="nats", series={"entropy": "policy/entropy"}),
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
        series={"waits for groups": "timers/rollout", "trains": "timers/train", "publishes": "timers/publish"},
        is_stacked=True,
        marks={"checkpoint": "timers/checkpoint"},
    ),
    Chart(
        name="correction",
        title="Off-policy correction",
        unit="",
        series={"mean ratio": "policy/ratio_mean", "effective samples": "policy/ess"},
    ),
    Chart(
        name="fresh",
        title="Engine vs learner on fresh samples",
        unit="nats",
        series={"mean difference": "policy/fresh_mismatch", "KL": "policy/fresh_mismatch_kl"},
    ),
    Chart(
        name="loss",
        title="Loss and gradient",
        unit="",
        series={"loss": "train_optim/loss", "gradient": "train_optim/grad_norm"},
    ),
    Chart(name="lr", title="Learning rate", unit="", series={"learning rate": "train_optim/lr"}),
    Chart(
        name="length",
        title="Response length",
        unit="tokens",
        series={"trained": "train_rollouts/response_lengths", "held out": "val_rollouts/response_lengths"},
    ),
    Chart(name="gpu", title="GPU of rank 0", unit="share", families={"": "gpu/"}),
    Chart(name="own", title="Metrics of the loss", unit="", families={"": OF_LOSS}),
)


def charts_of(history: History) -> tuple[Chart, ...]:
    """Return the charts with fixed series, and of the others those that the run has metrics for."""
    newest = (*history.steps.records[-_RECENT_RECORDS:], *history.validations.records[-_RECENT_RECORDS:])
    names = sorted({name for record in newest for name in record.values})
    found = []
    for chart in CHARTS:
        families = [
            {label + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
            for label, prefix in chart.families.items()
        ]
        if max(map(len, families), default=chart.min_members) >= chart.min_members:
            members = {label: name for family in families for label, name in family.items()}
            found.append(replace(chart, series={**chart.series, **members}))
    return tuple(found)


def points_of(chart: Chart, history: History) -> Mapping[str, Points]:
    """Return the points by label. In a stack a missing value counts as 0, so that all series have the same steps."""
    if not chart.is_stacked:
        return {label: list(zip(*history.curve(metric), strict=True)) for label, metric in chart.series.items()}
    records = [r for r in history.steps.records if any(metric in r.values for metric in chart.series.values())]
    return {label: [(r.step, r.values.get(metric, 0.0)) for r in records] for label, metric in chart.series.items()}


def marks_of(chart: Chart, history: History) -> Mapping[str, Points]:
    """Return the marks by label, only at steps where the event happened."""
    return {label: list(zip(*history.curve(metric), strict=True)) for label, metric in chart.marks.items()}


def sketches_of(history: History) -> list[tuple[str, list[float]]]:
    """Return each curve that has values, with its title, thinned for small displays."""
    records = (*thin(history.steps.records), *thin(history.validations.records))
    found = []
    for chart in charts_of(history):
        series = {**chart.series, **chart.marks}
        for label, metric in series.items():
            title = chart.title if len(series) == 1 else f"{chart.title}: {label}"
            if values := [record.values[metric] for record in records if metric in record.values]:
                found.append((title, values))
    return found


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
    places = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for chart, axes in zip(charts, places, strict=False):
        _draw(chart, history, axes)
    for unused in places[len(charts) :]:
        unused.remove()
    figure.savefig(path)


def _draw(chart: Chart, history: History, axes: Axes) -> None:
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    points = points_of(chart, history)
    if chart.is_stacked and any(points.values()):
        steps = [step for step, _ in next(iter(points.values()))]
        axes.stackplot(
            steps, [[value for _, value in line] for line in points.values()], labels=list(points), alpha=0.8
        )
    elif not chart.is_stacked:
        for label, label_points in points.items():
            _draw_line(label, label_points, axes, is_held_out=is_validation([chart.series[label]]))
    for label, label_points in marks_of(chart, history).items():
        if label_points:
            at, heights = zip(*label_points, strict=True)
            axes.scatter(at, heights, label=label, marker="v", s=14, color="black", zorder=3)
    if axes.has_data():
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", va="center", transform=axes.transAxes, fontsize=8)


def _draw_line(label: str, points: Points, axes: Axes, *, is_held_out: bool) -> None:
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    if is_held_out or len(steps) < 50:
        axes.plot(steps, values, label=label, marker="o" if is_held_out else None, markersize=3, linewidth=1.2)
    else:
        [line] = axes.plot(steps, values, linewidth=0.6, alpha=0.35)
        axes.plot(steps, running_mean(values), label=label, color=line.get_color(), linewidth=1.4)


def running_mean(values: list[float]) -> list[float]:
    """Replace each value by the mean of its surroundings."""
    half = max(1, round(len(values) * _SMOOTHING / 2))
    sums = list(accumulate(values, initial=0.0))
    bounds = ((max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values)))
    return [(sums[end] - sums[start]) / (end - start) for start, end in bounds]
