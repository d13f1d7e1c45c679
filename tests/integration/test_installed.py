"""streamrl as it is for somebody who has a wheel and no checkout: an environment of its own, and an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wheels import built

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "learner,worker-cpu,rewards,monitor,embedded"
_OWN = """\
extends: reinforce.yaml
model: {path: runs/quickstart/export}
data: {train: runs/quickstart/data/train.jsonl, validation: runs/quickstart/data/validation.jsonl}
rewards: {model: null, exact: {type: function, target: exact_match}}
reward_server: null
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """The folder with `streamrl` in it. Nothing is kept out of the environment: vLLM brings what it asks for."""
    wheel, environment = built(ROOT, tmp_path, "wheel"), tmp_path / "environment"
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, environment], timeout=60, check=True
    )
    try:
        words = (sys.executable, "--quiet", "--python", python, f"{wheel}[{EXTRAS}]")
        subprocess.run([ROOT / ".ci" / "uv-install", *words], cwd=tmp_path, timeout=1200, check=True)
        yield python.parent
    finally:
        shutil.rmtree(environment)  # of some gigabytes, where pytest keeps folders for a while


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def run(programs: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [programs / "streamrl", *words],
        cwd=folder,
        env=variables | {"VLLM_CACHE_ROOT": str(folder / "vllm")},  # it knows no model's class yet
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_wheel_alone_is_enough(programs: Path, empty: Path) -> None:
    helped = run(programs, empty, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")

    (empty / "own.yaml").write_text(_OWN)
    checked = run(programs, empty, "config", "check", "own.yaml", "--no-files")
    assert (checked.returncode, checked.stderr) == (0, "")

    cut_short = ("training.max_steps=3", "validation.max_prompts=20")
    learned = run(programs, empty, "quickstart", "--json", *cut_short)
    assert learned.returncode == 0, learned.stderr
    found = json.loads(learned.stdout.splitlines()[-1])
    assert (found["lost"], found["twice"], found["clean"]) == (0, 0, True)

    examined = run(programs, empty, "doctor", "own.yaml", "--json")
    assert examined.stderr == ""
    told = json.loads(examined.stdout)
    assert [one for one in told["findings"] if one["level"] == "error"] == []
    assert {one["name"] for one in told["findings"]} >= {"settings", "packages", "torch", "model"}
