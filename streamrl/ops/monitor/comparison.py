"""Compares runs by their folders: a table with one line each, and their curves in one PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import ConfigError
from streamrl.extras import need
from streamrl.ops.monitor.charts import CHARTS, Chart, running_mean
from streamrl.ops.monitor.history import HELD_OUT, History
from streamrl.ops.monitor.remains import read_remains
from streamrl.protocol.transport.keys import is_validation
from streamrl.protocol.transport.types import Record
from streamrl.terminal import age, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _SHAPE = 10.4, 0.52  # total width in inches; height of a chart relative to its width
_LINES = ("-", "--", ":", "-.")  # one per series of a chart; colours distinguish runs
_REWARD, _LAG, _TIME = "train_rollouts/rewards", "lag/mean", "timers/step"
_LENGTHS, _SIZE = "train_rollouts/response_lengths", "train_rollouts/rollout_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run; None: unknown."""

    name: str
    folder: str
    state: str
    reward: float | None  # of the last step
    best_held_out: float | None  # of the validations that rank checkpoints
    steps: int
    tokens: float  # trained response tokens
    seconds: float  # all steps together
    lag: float | None  # mean over these tokens, in steps


def compare(folders: Sequence[Path]) -> list[RunRow]:
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> RunRow:
    remains = read_remains(folder)
    history = History.read(folder, of_steps=(_REWARD, _LAG, _TIME, _LENGTHS, _SIZE))
    steps = history.steps.records
    tokens = [_tokens(record) for record in steps]
    lags = [record.values.get(_LAG, 0.0) * count for record, count in zip(steps, tokens, strict=True)]
    rewards = history.curve(_REWARD)[1]
    return RunRow(
        name=remains.name,
        folder=str(folder),
        state=remains.state,
        reward=rewards[-1] if rewards else None,
        best_held_out=max(history.ranked(HELD_OUT), default=None),
        steps=remains.step,
        tokens=sum(tokens),
        seconds=sum(record.values.get(_TIME, 0.0) for record in steps),
        lag=sum(lags) / sum(tokens) if sum(tokens) else None,
    )


def _tokens(record: Record) -> float:
    return record.values.get(_LENGTHS, 0.0) * record.values.get(_SIZE, 0.0)


def table(rows: Sequence[RunRow]) -> Iterator[str]:
    width = max(4, *(len(row.name) for row in rows))
    yield f"{'RUN':<{width}}  {'STATE':<9}{'REWARD':>8}{'BEST':>8}{'STEPS':>8}{'TOKENS':>9}{'TIME':>7}{'LAG':>7}"
    for row in rows:
        figures = f"{number(row.reward):>8}{number(row.best_held_out):>8}{row.steps:>8}{number(row.tokens):>9}"
        yield f"{row.name:<{width}}  {row.state:<9}{figures}{age(row.seconds):>7}{number(row.lag):>7}"


def save_overlay(path: Path, runs: Mapping[str, History]) -> None:
    """Draw the curves of all runs, chart by chart; of a stacked chart only the total."""
    need("a plot", "matplotlib", extra="monitor")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [chart for chart in CHARTS if any(_has(history, chart) for history in runs.values())]
    num_rows = -(-len(charts) // 2)
    figure = Figure(figsize=(_WIDTH, num_rows * _SHAPE * _WIDTH / 2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(" against ".join(runs))
    for place, chart in enumerate(charts, start=1):
        _draw(chart, runs, figure.add_subplot(num_rows, 2, place))
    figure.savefig(path)


def _has(history: History, chart: Chart) -> bool:
    return any(history.curve(metric)[0] for metric in chart.series.values())


def _draw(chart: Chart, runs: Mapping[str, History], axes: Axes) -> None:
    axes.set_title(chart.title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(chart.unit, fontsize=8)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    for place, (name, history) in enumerate(runs.items()):
        for line, (label, metric) in zip(_LINES, _series(chart).items(), strict=False):
            steps, values = _curve(chart, metric, history)
            is_held_out = is_validation([metric])
            shown = values if is_held_out or len(steps) < 50 else running_mean(values)
            marker = "o" if is_held_out else ""
            if steps:
                axes.plot(steps, shown, line, label=f"{name}: {label}", color=f"C{place}", marker=marker, markersize=3)
    axes.legend(fontsize=7, frameon=False)


def _series(chart: Chart) -> Mapping[str, str]:
    return {"all": ""} if chart.is_stacked else chart.series


def _curve(chart: Chart, metric: str, history: History) -> tuple[list[int], list[float]]:
    if not chart.is_stacked:
        return history.curve(metric)
    metrics = chart.series.values()
    having = [record for record in history.steps.records if any(metric in record.values for metric in metrics)]
    sums = [sum(record.values.get(metric, 0.0) for metric in metrics) for record in having]
    return [record.step for record in having], sums


def histories(folders: Sequence[Path]) -> dict[str, History]:
    """Return the histories by run name, or by folder if two runs have the same name."""
    found = [read_remains(folder) for folder in folders]
    names = [remains.name for remains in found]
    if empty := [remains for remains in found if not remains.history.steps.records]:
        raise ConfigError(f"{empty[0].folder} has no step in its metrics.jsonl: there is nothing to plot")
    are_unique = len(set(names)) == len(names)
    return {remains.name if are_unique else str(remains.folder): remains.history for remains in found}
