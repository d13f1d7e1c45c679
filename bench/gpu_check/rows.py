"""Parameters and results of a part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.report import finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scale of a check: a GPU and realistic shapes, or a CPU and tiny ones."""

    device: torch.device

    @property
    def is_reduced(self) -> bool:
        return self.device.type != "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    value: float
    unit: str
    goal: float | None = None
    better: str = "higher"  # or lower
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        met = self.value >= self.goal if self.better == "higher" else self.value <= self.goal
        return "ok" if met and math.isfinite(self.value) else "MISSED"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a part."""

    part: str
    rows: tuple[Row, ...]
    not_run: str = ""  # the reason, if it ended early or never started


def table(outcomes: list[Outcome]) -> Iterator[str]:
    width = max((len(row.what) for one in outcomes for row in one.rows), default=0)
    for one in outcomes:
        yield one.part
        for row in one.rows:
            sign = {"higher": ">=", "lower": "<="}[row.better]
            goal = "" if row.goal is None else f"{sign} {row.goal:g} {row.verdict}"
            value = f"{row.value:.4g}" if math.isfinite(row.value) else "-"
            yield f"  {row.what:<{width}}  {value:>10} {row.unit:<9} {goal:<18} {row.note}".rstrip()
        if one.not_run:
            yield f"  NOT RUN: {one.not_run}"


def as_json(outcomes: list[Outcome], machine: str) -> str:
    parts = [{**asdict(one), "rows": [_to_json(row) for row in one.rows]} for one in outcomes]
    return json.dumps({"machine": machine, "parts": parts}, allow_nan=False)


def _to_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "value": finite(row.value), "verdict": row.verdict}
