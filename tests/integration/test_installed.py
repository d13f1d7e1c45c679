"""streamrl as it is for somebody who has a wheel and no checkout: an environment of its own, and an empty folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

_OWN = """\
extends: reinforce.yaml
model: {path: runs/quickstart/export}
data: {train: runs/quickstart/data/train.jsonl, validation: runs/quickstart/data/validation.jsonl}
rewards: {model: null, exact: {type: function, target: exact_match}}
reward_server: null
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


def run(folder: Path, variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["streamrl", *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False
    )


def test_a_wheel_alone_is_enough(empty: Path, alone: dict[str, str]) -> None:
    helped = run(empty, alone, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")

    (empty / "own.yaml").write_text(_OWN)
    checked = run(empty, alone, "config", "check", "own.yaml", "--no-files")
    assert (checked.returncode, checked.stderr) == (0, "")

    cut_short = ("training.max_steps=3", "validation.max_prompts=20")
    learned = run(empty, alone, "quickstart", "--json", *cut_short)
    assert learned.returncode == 0, learned.stderr
    found = json.loads(learned.stdout.splitlines()[-1])
    assert (found["lost"], found["twice"], found["clean"]) == (0, 0, True)

    examined = run(empty, alone, "doctor", "own.yaml", "--json")
    assert examined.stderr == ""
    told = json.loads(examined.stdout)
    assert [one for one in told["findings"] if one["level"] == "error"] == []
    assert {one["name"] for one in told["findings"]} >= {"settings", "packages", "torch", "model"}
