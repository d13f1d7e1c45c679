"""T25: everything at random, for some seconds; `make chaos ARGS="random --minutes 30"` is the same for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.measure import Say
from tests.faults.random_faults import run_at_random
from tests.faults.report import report


@pytest.mark.parametrize("seconds", [6.0, pytest.param(120.0, marks=pytest.mark.long)])
def test_a_run_survives_whatever_happens_in_whatever_order(tmp_path: Path, seconds: float) -> None:
    outcome = run_at_random(tmp_path, seconds=seconds, seed=25, say=Say("random"))
    report(
        "T25",
        outcome.audit,
        injections=outcome.num_injections,
        recovery_s=max(outcome.recoveries_s),
        wasted_steps=outcome.wasted_steps,
        wrong=outcome.wrong_weights,
        leaks=outcome.leaks.num_found,
    )
    assert outcome.audit.trained > 0
    assert outcome.ok, "\n".join(outcome.render())
