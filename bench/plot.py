"""Plots curves to a file, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curves(path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> str:
    """Draw the curves; return a message about the result."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: install matplotlib, of the extra `monitor`"
    from matplotlib.figure import Figure  # not pyplot, which changes global state

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return f"drawn: {path}"
