"""A bench's results, and their formats: a table for people, JSON for programs, a dated section for RESULTS.md."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).with_name("RESULTS.md")
_FEWEST_IN_A_GRID = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure with a goal."""

    name: str
    value: float
    unit: str  # "x" for ratios
    goal: float
    better: Literal["higher", "lower"]

    @property
    def ok(self) -> bool:
        met = self.value >= self.goal if self.better == "higher" else self.value <= self.goal
        return bool(met and math.isfinite(self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A figure that helps to interpret the bars; named "THING: FIGURE" if several things share the same figures."""

    name: str
    value: float
    unit: str


Line = Bar | Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu: str
    cores: int  # available to this process
    memory_gb: float
    system: str
    python: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory_gb:g} GB, {self.system}, Python {self.python}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    bench: str
    quick: bool
    machine: Machine
    lines: tuple[Line, ...]

    @property
    def bars(self) -> list[Bar]:
        return [line for line in self.lines if isinstance(line, Bar)]

    @property
    def facts(self) -> list[Fact]:
        return [line for line in self.lines if isinstance(line, Fact)]


def describe_machine() -> Machine:
    """Describe the machine as far as figures depend on it, without identifying it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(memory / 2**30, 1),
        system=platform.system(),
        python=platform.python_version(),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def to_json(report: Report) -> str:
    """Return the report as one line."""
    return json.dumps(
        {
            "bench": report.bench,
            "quick": report.quick,
            "machine": asdict(report.machine),
            "bars": [{**asdict(bar), "value": finite(bar.value), "ok": bar.ok} for bar in report.bars],
            "facts": [{**asdict(fact), "value": finite(fact.value)} for fact in report.facts],
        },
        allow_nan=False,
    )


def finite(value: float) -> float | None:
    """Return the value, or None for a figure that could not be measured (NaN): JSON has no word for it."""
    return value if math.isfinite(value) else None


def table(report: Report) -> str:
    width = max(len(line.name) for line in report.lines)
    return "\n".join([f"{report.bench}{' (quick)' if report.quick else ''} on {report.machine}", *_rows(report, width)])


def _rows(report: Report, width: int) -> Iterator[str]:
    for bar in report.bars:
        sign = ">=" if bar.better == "higher" else "<="
        verdict = "ok" if bar.ok else "MISSED"
        yield f"  {bar.name:<{width}}  {_show(bar.value):>9} {bar.unit:<9} {sign} {_show(bar.goal):<7} {verdict}"
    things = _measured_alike(report.facts)
    in_grid = {fact for figures in things.values() for fact in figures.values()}
    for fact in report.facts:
        if fact not in in_grid:
            yield f"  {fact.name:<{width}}  {_show(fact.value):>9} {fact.unit}"
    if things:
        yield ""
        yield from _grid(things)


def _measured_alike(facts: Sequence[Fact]) -> Mapping[str, Mapping[str, Fact]]:
    """Group facts by thing, if several things have the same figures; otherwise return nothing."""
    things: dict[str, dict[str, Fact]] = {}
    for fact in facts:
        thing, colon, figure = fact.name.partition(": ")
        if colon:
            things.setdefault(thing, {})[figure] = fact
    shapes = [tuple(figures) for figures in things.values() if len(figures) > 1]
    usual = max(shapes, key=shapes.count, default=())
    alike = {thing: figures for thing, figures in things.items() if tuple(figures) == usual}
    return alike if len(alike) >= _FEWEST_IN_A_GRID else {}


def _grid(things: Mapping[str, Mapping[str, Fact]]) -> list[str]:
    """Return the table, transposed if that is narrower."""
    figures = next(iter(things.values()))
    heads = ["", *(f"{figure} ({fact.unit})" if fact.unit else figure for figure, fact in figures.items())]
    rows = [[thing, *(_show(fact.value) for fact in facts.values())] for thing, facts in things.items()]
    turned = list(zip(heads, *rows, strict=True))
    return min(_aligned([heads, *rows]), _aligned(turned), key=lambda lines: len(lines[0]))


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([f"  {first:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    ]


def _show(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def record(report: Report, path: Path = RESULTS, *, now: datetime | None = None) -> None:
    """Write the report to the record with its date and command, replacing the previous one of that command."""
    date = (now or datetime.now(UTC)).date().isoformat()
    command = f"python -m bench {report.bench}{' --quick' if report.quick else ''}"
    shown = [line.rstrip() for line in table(report).splitlines()]
    section = "\n".join([f"## {date}: {command}", "", "```", *shown, "```"])
    text = path.read_text() if path.exists() else ""
    before = re.compile(rf"^## [0-9-]+: {re.escape(command)}$.*?(?=\n## |\Z)", re.DOTALL | re.MULTILINE)
    path.write_text(before.sub(lambda _: f"{section}\n", text) if before.search(text) else f"{text}\n{section}\n")
