"""What a bench says, and how it is shown: a table for people, JSON for programs, a dated section for the record."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).with_name("RESULTS.md")


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
        return bool(self.value >= self.goal if self.better == "higher" else self.value <= self.goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A figure that helps to read the bars."""

    name: str
    value: float
    unit: str


Line = Bar | Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
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
    """What a reader of the figures must know of it, and nothing that says whose it is."""
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
    """One line."""
    return json.dumps(
        {
            "bench": report.bench,
            "quick": report.quick,
            "machine": asdict(report.machine),
            "bars": [{**asdict(bar), "ok": bar.ok} for bar in report.bars],
            "facts": [asdict(fact) for fact in report.facts],
        },
        allow_nan=False,
    )


def table(report: Report) -> str:
    width = max(len(line.name) for line in report.lines)
    return "\n".join([f"{report.bench}{' (quick)' if report.quick else ''} on {report.machine}", *_rows(report, width)])


def _rows(report: Report, width: int) -> Iterator[str]:
    for bar in report.bars:
        sign = ">=" if bar.better == "higher" else "<="
        verdict = "ok" if bar.ok else "MISSED"
        yield f"  {bar.name:<{width}}  {_show(bar.value):>9} {bar.unit:<9} {sign} {_show(bar.goal):<7} {verdict}"
    for fact in report.facts:
        yield f"  {fact.name:<{width}}  {_show(fact.value):>9} {fact.unit}"


def _show(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def record(report: Report, path: Path = RESULTS, *, now: datetime | None = None) -> None:
    """Add the report to the record, with its date and its command."""
    date = (now or datetime.now(UTC)).date().isoformat()
    command = f"python -m bench {report.bench}{' --quick' if report.quick else ''}"
    section = _section(f"{date}: {command}", table(report).splitlines())
    with path.open("a") as file:
        file.write(section)


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join(["", f"## {title}", "", "```", *(line.rstrip() for line in lines), "```", ""])
