"""The quickstart's last page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.quickstart.plot import HELD_OUT_MARK, TRAIN_MARK, smoothed, terminal_plot
from streamrl.quickstart.report import make_report, report_lines
from tests.unit.test_summary import make_summary, step, validation, write


def write_run(folder: Path) -> Path:
    exact = {"train_rollouts/rewards/exact": 0.5}
    write(folder, validation(0, 0.4), *(step(number, **exact) for number in (1, 2)), validation(2, 0.9))
    answers = (("31>", "31", ("13", "31")), ("12<", "12", ("12", "12")), ("21<", "12", ("21", "1")))
    lines = []
    for at in (0, 1):
        samples = [{"prompt": p, "completion": c[at], "reward": 0.0, "fields": {"answer": a}} for p, a, c in answers]
        lines.append(json.dumps({"step": 2 * at, "samples": samples}) + "\n")
    (folder / "validation.jsonl").write_text("".join(lines))
    return folder


def report_of(folder: Path, **changes: Any) -> Any:
    return make_report(folder, make_summary(folder, **changes), prepare_s=20.0, total_s=80.0)


def test_the_report_says_before_and_after_and_shows_completions_that_changed_first(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path))
    lines = list(report_lines(report))

    assert lines[0] == "Right answers on held-out prompts: 40.0% before, 90.0% after (+50.0%)"
    assert [one.prompt for one in report.completions] == ["31>", "21<", "12<"]
    assert any(line.split() == ["31>", "31", "13", "✗", "31", "✓"] for line in lines)
    assert any(line.startswith("lost, twice") for line in lines)


def test_the_plot_is_saved_as_a_picture(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path))

    assert report.plot.read_bytes().startswith(b"\x89PNG")


def test_the_numbers_are_there_as_json(tmp_path: Path) -> None:
    found = json.loads(json.dumps(report_of(write_run(tmp_path), issued=5, trained=5).to_json()))

    assert (found["before"], found["after"], found["rise"]) == (0.4, 0.9, 0.5)
    assert (found["lost"], found["twice"], found["trained"]) == (0, 0, 5)
    assert found["loads"]["in_flight"] == 7


def test_the_terminal_plot_has_its_points_where_they_belong() -> None:
    lines = terminal_plot([(0, 0.0), (10, 0.0)], [(0, 0.0), (10, 1.0)], width=21, height=11)

    assert lines[0] == " 1.0 │" + " " * 20 + HELD_OUT_MARK
    assert lines[10] == " 0.0 │" + HELD_OUT_MARK + " " * 19 + TRAIN_MARK
    assert lines[12].split() == ["0", "steps", "10"]


def test_smoothing_keeps_a_constant_and_the_number_of_points() -> None:
    assert smoothed([(step, 2.0) for step in range(30)]) == [(step, 2.0) for step in range(30)]
