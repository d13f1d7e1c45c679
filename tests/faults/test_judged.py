"""T28, T29, T30, T31: runs of each kind, of real processes to which everything happens, under a judge of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.measure import Say
from tests.faults.judged.kinds import KINDS
from tests.faults.judged.outcome import Sitting
from tests.faults.judged.run import run_judged
from tests.faults.report import Row, note

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

_SECONDS = 150.0
_SCENARIOS = {"files": "T28", "tls": "T29", "lora": "T30", "plain": "T31"}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_to_which_everything_happens_is_found_sound_by_the_judge(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "run").mkdir()
    found = run_judged(
        KINDS[name], folder, seconds=_SECONDS, seed=28, without=(), keep=tmp_path / "kept", say=Say("judged")
    )
    note(
        Row(
            scenario=_SCENARIOS[name],
            injections=sum(found.injections.values()),
            lost=found.verdict.count("lost"),
            twice=found.verdict.count("twice"),
            recovery_s=max(found.recoveries_s),
            more={"wrong": sum(one.kind == "weights" for one in found.violations)},
        )
    )
    assert found.ok, "\n".join(Sitting(runs=[found]).render())
    assert found.verdict.steps_checked > 0
    assert found.weights_compared > 0 or KINDS[name].lora
