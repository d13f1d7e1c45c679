"""What is made of a pretrained model's trials: differences sum by sum, and what they decide."""

from __future__ import annotations

import numpy as np
import pytest

from bench.report import Bar
from bench.stale_pretrained import lines, shortfall
from bench.stale_trial import Task, Trial


def trial(right: int, of: int = 100) -> Trial:
    return Trial(right=[1] * right + [0] * (of - right), rewards=[0.5], clipped=0.01, effective=0.9, length=12.0)


def test_a_shortfall_is_a_share_of_on_policy_and_its_error_that_of_pairs() -> None:
    fresh, stale = [trial(80), trial(60)], [trial(72), trial(54)]
    short = shortfall(fresh, stale)
    assert short.mean == pytest.approx(0.1)  # 14 of 140
    differences = np.array([1.0] * 14 + [0.0] * 186) / 0.7
    assert short.error == pytest.approx(differences.std(ddof=1) / np.sqrt(200))
    assert shortfall(fresh, fresh).error == 0.0


def test_bars_are_those_of_the_default_and_of_what_must_fail() -> None:
    found = {("truncated", 0): [trial(80)], ("truncated", 8): [trial(79)], ("truncated", 32): [trial(60)]}
    told = list(lines({**found, ("none", 32): [trial(79)]}, Task()))
    bars = {line.name: line.ok for line in told if isinstance(line, Bar)}
    assert [name.partition(":")[0] for name in bars] == ["truncated, lag 8", "truncated, lag 32", "none, lag 32"]
    assert list(bars.values()) == [True, False, False]
