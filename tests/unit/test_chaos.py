"""The table of what a run must survive: nothing is missing in it, and what was broken off goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.resume import Done
from tests.faults.chaos_catalogue import SCENARIOS, find_modules
from tests.faults.chaos_table import FAILED, NOT_BUILT, NOT_IN_SET, OK, ModuleResult, line_of, render


def row(scenario: str, **changes: Any) -> dict[str, Any]:
    fields = {"injections": 1, "lost": 0, "twice": 0, "recovery_s": None, "wasted_steps": None, "more": {}}
    return {"scenario": scenario, **fields, **changes}


def ran(*rows: dict[str, Any], exit_code: int = 0) -> ModuleResult:
    return ModuleResult(module="tests/test_x.py", exit_code=exit_code, seconds=1.0, rows=rows)


def test_modules_are_found_by_what_their_docstring_begins_with(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    one, other, neither = (tmp_path / name for name in ("test_one.py", "deep/test_other.py", "test_neither.py"))
    one.write_text('"""T1, T24: killed."""\n')
    other.write_text('"""T24: at every point."""\n')
    neither.write_text('"""What T1 says."""\n')
    found = find_modules(tmp_path)
    assert (found["T1"], found["T24"], found["T2"]) == ([one], [other, one], [])
    assert list(found) == [f"T{number}" for number in range(1, 1 + len(SCENARIOS))]


def test_every_scenario_has_a_module_in_this_repository() -> None:
    found = find_modules(Path(__file__).parents[1])
    assert [scenario for scenario, modules in found.items() if not modules] == []


def test_a_scenario_without_a_module_is_told_as_not_built() -> None:
    line = line_of("T5", [], is_built=False)
    assert line.verdict == NOT_BUILT
    assert render([line])[1].split("  ")[-1] == NOT_BUILT


def test_rows_of_a_scenario_are_summed_and_its_longest_recovery_counts() -> None:
    rows = (
        row("T7 learner", recovery_s=1.0, more={"wrong": 0}),
        row("T7 worker", injections=2, recovery_s=3.0, more={"p95_s": 2.0}),
    )
    line = line_of("T7", [ran(*rows, row("T70"))], is_built=True)
    assert (line.num_rows, line.injections, line.wasted_steps) == (2, 3, None)
    assert (line.recovery_s, line.p95_s) == (3.0, 2.0)
    assert (line.lost, line.twice, line.wrong_weights, line.verdict) == (0, 0, 0, OK)


def test_what_was_lost_or_failed_is_a_failure() -> None:
    assert line_of("T7", [ran(row("T7", lost=1))], is_built=True).verdict == FAILED
    assert line_of("T7", [ran(row("T7")), ran(exit_code=1)], is_built=True).verdict == FAILED
    assert line_of("T7", [ran(exit_code=2)], is_built=True).verdict == FAILED


def test_a_scenario_whose_tests_are_all_in_another_set_says_so() -> None:
    assert line_of("T1", [ran(exit_code=5)], is_built=True).verdict == NOT_IN_SET
    assert line_of("T1", [ran(row("T3"))], is_built=True).verdict == NOT_IN_SET


def test_every_line_of_the_table_ends_with_its_verdict() -> None:
    lines = [line_of(scenario, [ran(row(scenario, wasted_steps=2))], is_built=True) for scenario in SCENARIOS]
    assert [text.split()[-1] for text in render(lines)[1:]] == [OK] * len(SCENARIOS)


def test_what_was_broken_off_goes_on_and_what_is_complete_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    first = Done(path, of="a")
    first.add("x", {"n": 1})
    with path.open("a") as file:
        file.write('{"name": "y", "res')  # the power failed
    again = Done(path, of="a")
    assert "x" in again
    assert "y" not in again
    again.add("y", {"n": 2})
    assert Done(path, of="a")["y"] == {"n": 2}
    assert "x" not in Done(path, of="b")
    complete = Done(path, of="b")
    complete.add("x", {"n": 3})
    complete.complete()
    assert "x" not in Done(path, of="b")
    fresh = Done(path, of="b")
    fresh.add("x", {"n": 4})
    assert "x" not in Done(path, of="b", fresh=True)
