"""The curve of a run as text, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.monitor.plot import running_mean

Points = Sequence[tuple[float, float]]  # (step, share of right answers)
TRAIN_MARK, HELD_OUT_MARK = "·", "●"
_WIDTH, _HEIGHT = 66, 11


def terminal_plot(train: Points, held_out: Points, *, width: int = _WIDTH, height: int = _HEIGHT) -> list[str]:
    """Lines of text; the axes go from 0 to the last step and from 0 to 1."""
    last = max((step for step, _ in (*train, *held_out)), default=0) or 1
    field = [[" "] * width for _ in range(height)]
    smoothed = zip((step for step, _ in train), running_mean([value for _, value in train]), strict=True)
    for points, mark in ((smoothed, TRAIN_MARK), (held_out, HELD_OUT_MARK)):
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
