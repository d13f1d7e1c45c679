"""What the page's script works out before it draws, under node where there is one; the page itself needs a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import streamrl.ops.monitor.web

SCRIPT = Path(streamrl.ops.monitor.web.__file__).with_name("charts.js")


def evaluate(expression: str) -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH: `apt-get install nodejs` runs the tests of the page's script")
    program = f"{SCRIPT.read_text()}\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.0001, 0.00023), (12345, 99999), (0.9991, 0.9999), (-3, 250)])
def test_an_axis_has_round_numbers_within_the_chart_with_labels_that_differ_and_fit(low: float, high: float) -> None:
    ticks = evaluate(f"ticks({low}, {high})")
    assert 3 <= len(ticks) <= 8
    assert all(low <= tick <= high for tick in ticks)
    labels = evaluate(f"ticks({low}, {high}).map((tick, place, all) => tickLabel(tick, all[1] - all[0]))")
    assert len(set(labels)) == len(labels), labels
    assert max(map(len, labels)) <= 8, labels


def test_a_stack_lies_on_what_is_below_it() -> None:
    assert evaluate("stack([[[1, 2], [2, 3]], [[1, 5], [2, 0]]])") == [[[1, 0, 2], [2, 0, 3]], [[1, 2, 7], [2, 3, 3]]]


def test_a_version_is_served_until_the_next_and_the_last_one_until_now() -> None:
    assert evaluate("stairs([[0, 1], [5, 2]], 9)") == [[0, 1], [5, 1], [5, 2], [9, 2]]


def test_a_smoothed_curve_has_the_same_steps_and_less_noise() -> None:
    noisy = [[step, step % 2] for step in range(100)]
    smoothed = evaluate(f"smooth({noisy}, 0.2)")
    assert [step for step, _ in smoothed] == list(range(100))
    assert all(abs(value - 0.5) < 0.1 for _, value in smoothed)
