"""The last page of a demonstration."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.config.shipped import shipped_config
from streamrl.demos.pretrained import DEMO
from streamrl.demos.quickstart import QUICKSTART
from streamrl.demos.report import (
    HELD_OUT_MARK,
    TRAIN_MARK,
    Showcase,
    count_prompts,
    make_report,
    report_lines,
    terminal_plot,
)
from streamrl.errors import ResourceError
from streamrl.ops.monitor.charts import running_mean
from tests.pages import ROOT, blocks
from tests.unit.test_summary import make_summary, step, validation, write

TEXTS_OF_README = [block.text for block in blocks(ROOT / "README.md", "text")]


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


def config_of(folder: Path, train: tuple[str, ...] = ("31>", "54<"), held_out: tuple[str, ...] = ("12<",)) -> Config:
    """Of a run in this folder, with data beside it."""
    paths = {"train": train, "validation": held_out}
    for name, prompts in paths.items():
        lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) + "\n" for prompt in prompts)
        (folder / f"{name}-prompts.jsonl").write_text("".join(lines))
    places = [f"data.{name}={folder / f'{name}-prompts.jsonl'}" for name in paths]
    return load_config(
        shipped_config("quickstart.yaml"), [f"dir={folder.parent}", f"name={folder.name}", *places]
    ).config


def report_of(folder: Path, **changes: Any) -> Any:
    return make_report(config_of(folder), QUICKSTART, make_summary(folder, **changes), prepare_s=20.0, total_s=80.0)


def test_the_report_says_before_and_after_and_shows_completions_that_changed_first(tmp_path: Path) -> None:
    report = report_of(write_run(tmp_path))
    lines = list(report_lines(report))

    assert lines[0] == "Right answers on held-out prompts: 40.0% before, 90.0% after (+50.0%)"
    assert [one.prompt for one in report.completions] == ["31>", "21<", "12<"]
    assert any(line.split() == ["31>", "31", "13", "✗", "31", "✓"] for line in lines)
    assert any(line.startswith("lost, twice") for line in lines)


def test_a_demonstration_whose_validations_all_timed_out_says_what_to_raise(tmp_path: Path) -> None:
    write(write_run(tmp_path), *(validation(at, 0.9, **{"val_rollouts/ranks": 0.0}) for at in (0, 2)))

    with pytest.raises(ResourceError, match=r"raise validation\.timeout_s = "):
        report_of(tmp_path)


@pytest.mark.parametrize("case", [QUICKSTART, DEMO], ids=lambda case: case.name)
def test_what_the_readme_shows_are_lines_of_the_report_in_their_order(case: Showcase, tmp_path: Path) -> None:
    """All but the figures."""
    [told] = [text for text in TEXTS_OF_README if f"of them for {case.prepared}\n" in text]
    report = replace(report_of(write_run(tmp_path)), prepared=case.prepared)
    printed = [without_figures(line) for line in report_lines(report)]

    shown = [without_figures(line) for line in told.splitlines()]
    assert [line for line in printed if line in shown] == shown


def without_figures(line: str) -> str:
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())


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
    assert running_mean([2.0] * 30) == [2.0] * 30


def test_prompts_that_are_trained_and_held_out_are_counted_in_the_files_of_the_run(tmp_path: Path) -> None:
    apart = count_prompts(config_of(tmp_path, train=("1+1", "2+2", "2+2"), held_out=("3+3",)))
    mixed = count_prompts(config_of(tmp_path, train=("1+1", "2+2"), held_out=("3+3", "2+2")))

    assert (apart.to_train, apart.held_out, apart.in_both) == (2, 1, 0)
    assert (mixed.to_train, mixed.held_out, mixed.in_both) == (2, 2, 1)


def test_the_report_says_how_many_prompts_were_held_out_and_that_none_was_trained(tmp_path: Path) -> None:
    lines = list(report_lines(report_of(write_run(tmp_path))))

    assert [" ".join(line.split()) for line in lines].count("prompts 2 to train on, 1 held out, 0 in both") == 1


def test_a_long_answer_does_not_break_the_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    text = (folder / "validation.jsonl").read_text()
    (folder / "validation.jsonl").write_text(text.replace('"13"', json.dumps("a\n" + "b" * 200)))

    [row] = [line for line in report_lines(report_of(folder)) if line.startswith("31>")]

    assert row.split() == ["31>", "31", "a", "b" * 37 + "…", "✗", "31", "✓"]
