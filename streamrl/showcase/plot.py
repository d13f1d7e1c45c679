"""The curve of a run: as text in the terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]  # (step, share of right answers)
TRAIN_MARK, HELD_OUT_MARK = "·", "●"
_WIDTH, _HEIGHT = 66, 11
_SMOOTHING = 9  # steps


def terminal_plot(train: Points, held_out: Points, *, width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """Lines of text; the axes go from 0 to the last step and from 0 to 1."""
    last = max((step for step, _ in (*train, *held_out)), default=0) or 1
    field = [[" "] * width for _ in range(height)]
    for points, mark in ((smoothed(train), TRAIN_MARK), (held_out, HELD_OUT_MARK)):
        for step, value in points:
            column = round(step / last * (width - 1))
            row = height - 1 - round(min(1.0, max(0.0, value)) * (height - 1))
            field[row][column] = mark
    lines = []
    for row, cells in enumerate(field):
        share = 1 - row / (height - 1)
        label = f"{share:4.1f}" if row % 2 == 0 else " " * 4
        lines.append(f"{label} │{''.join(cells)}".rstrip())
    steps = f"{last:.0f}"
    lines.append(f"{' ' * 4} └{'─' * width}")
    lines.append(f"{' ' * 6}0{'steps'.center(width - 1 - len(steps))}{steps}")
    return lines


def smoothed(points: Points) -> list[tuple[float, float]]:
    """Each value replaced by the mean of those around it."""
    half = _SMOOTHING // 2
    values = [value for _, value in points]
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def save_png(path: Path, train: Points, held_out: Points) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_columns(train), color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(
        *_columns(smoothed(train)), color="tab:blue", label="trained groups, sampled (all right or all wrong: dropped)"
    )
    axes.plot(*_columns(held_out), color="tab:red", marker="o", label="held-out prompts")
    axes.set(xlabel="optimizer step", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
