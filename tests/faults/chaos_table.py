"""The results of all scenarios: one line each, whether built or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.chaos_catalogue import SCENARIOS

OK, FAILED, NOT_BUILT, NOT_IN_SET = "ok", "FAILED", "not built", "not in this set"
_NO_TESTS_SELECTED = 5  # pytest's exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult:
    """One run of a test module."""

    module: str
    exit_code: int
    seconds: float
    rows: Sequence[Mapping[str, Any]]  # as `tests.faults.report` writes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One scenario's results; None if its tests do not report a value."""

    scenario: str
    done: str
    verdict: str
    num_rows: int = 0
    injections: int | None = None
    lost: int | None = None
    twice: int | None = None
    wrong_weights: int | None = None  # served
    recovery_s: float | None = None  # the longest
    p95_s: float | None = None  # of the recoveries, if there were enough
    wasted_steps: int | None = None


def line_of(scenario: str, results: Sequence[ModuleResult], *, is_built: bool) -> Line:
    done = SCENARIOS[scenario]
    if not is_built:
        return Line(scenario=scenario, done=done, verdict=NOT_BUILT)
    ran = [result for result in results if result.exit_code != _NO_TESTS_SELECTED]
    rows = [row for result in ran for row in result.rows if row["scenario"].split()[0] == scenario]
    failed = any(result.exit_code for result in ran)
    # A module of several scenarios may have only some of them in this set.
    if not ran or (not rows and not failed):
        return Line(scenario=scenario, done=done, verdict=NOT_IN_SET)
    return Line(
        scenario=scenario,
        done=done,
        verdict=FAILED if failed or any(row["lost"] or row["twice"] for row in rows) else OK,
        num_rows=len(rows),
        injections=_total(row["injections"] for row in rows),
        lost=_total(row["lost"] for row in rows),
        twice=_total(row["twice"] for row in rows),
        wrong_weights=_total(row["more"].get("wrong") for row in rows),
        recovery_s=_longest(row["recovery_s"] for row in rows),
        p95_s=_longest(row["more"].get("p95_s") for row in rows),
        wasted_steps=_total(row["wasted_steps"] for row in rows),
    )


def render(lines: Sequence[Line]) -> list[str]:
    width = max(len(line.done) for line in lines)
    heading = (
        f"     {'what was done':<{width}}  runs  injected  lost  twice  wrong weights  recovery     p95  wasted steps"
    )
    return [heading, *(_render(line, width) for line in lines)]


def _render(line: Line, width: int) -> str:
    start = f"{line.scenario:<4} {line.done:<{width}}"
    if line.verdict in (NOT_BUILT, NOT_IN_SET):
        return f"{start}  {line.verdict}"
    counts = f"{line.num_rows:>4}  {_show(line.injections):>8}  {_show(line.lost):>4}  {_show(line.twice):>5}"
    times = f"{_show_s(line.recovery_s):>8}  {_show_s(line.p95_s):>6}"
    rest = f"{_show(line.wrong_weights):>13}  {times}  {_show(line.wasted_steps):>12}"
    return f"{start}  {counts}  {rest}  {line.verdict}"


def _show(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _show_s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _longest(times: Iterator[float | None]) -> float | None:
    """The longest; None if no row has a value."""
    return max((seconds for seconds in times if seconds is not None), default=None)


def _total(counts: Iterator[int | None]) -> int | None:
    """The sum; None if no row has a value."""
    known = [int(count) for count in counts if count is not None]
    return sum(known) if known else None
