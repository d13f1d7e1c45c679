"""`streamrl.start` with everything real: programs whose rewards are functions of their own file, which no worker can
import. What is told of a run is what its program prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from streamrl.demos.quickstart import write_base_model, write_data
from tests.helpers import processes_in, temporary_files, wait_until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
model: {path: base, dtype: float32}
data: {train: data/train.jsonl, max_prompt_tokens: 16}
sampling: {num_samples: 4, max_tokens: 8}
rewards: {exact: {type: function, target: exact_match}}
optimizer: {lr: 1e-4, min_lr: 1e-5}
training: {groups_per_step: 4}
lag: {max_steps: 2}
weights: {dtype: float32}
validation: {every_steps: 0, at_start: false, at_end: false}
worker: {threads: 1, grace_s: 2.0, engine: transformers}
learner: {threads: 1}
"""
HEAD = """
import streamrl

SCALE = 8


def near(prompt, completion, token_ids, fields):
    return sum(a == b for a, b in zip(completion, fields["answer"])) / SCALE


def broken(completions, answer, **kwargs):
    return [float(one) for one in answer[0]["no such"]]
"""
TRAINS = """
if __name__ == "__main__":
    import json

    with streamrl.start("mine.yaml", {"name": "whole", "training.max_steps": 2}, rewards=[near]) as run:
        steps = [(step.number, step.reward) for step in run]
        done = run.wait()
    again = streamrl.start("mine.yaml", {"name": "whole", "training.max_steps": %d}, rewards=[near]).wait(timeout=240)
    print(json.dumps({
        "steps": steps, "first": done.state, "second": again.steps, "export": str(done.export),
        "clean": again.summary["clean"], "rewards": list(run.status().limits.reward_sources),
        "found": streamrl.attach("runs/whole").wait().reward == again.reward,
    }))
"""
GOES_ON = """
run = streamrl.start("mine.yaml", {"name": "whole", "training.max_steps": 400}, rewards={"near": near})
for step in run:
    print(step.number, flush=True)
"""
FAILS = """
try:
    streamrl.start("mine.yaml", {"name": "whole"}, rewards=[near, broken], quiet=True)
except streamrl.UserError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the program runs. Afterwards nothing of a run may be left but its folder."""
    write_base_model(tmp_path / "base", seed=1)
    write_data(tmp_path / "data", seed=1)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    with tempfile.TemporaryDirectory(prefix="py-", dir="/tmp") as temporary:  # a short path, for sockets
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.chdir(tmp_path)
        yield tmp_path
        # The launcher, whose command line names no folder, may be at its last act.
        wait_until(lambda: temporary_files(temporary) == [], description="no temporary file of the run")
    assert processes_in(tmp_path) == []
    assert [path for path in tmp_path.rglob("*") if path.is_socket()] == []


def start(folder: Path, program: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(HEAD + program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "program.py"],
        env=environment,
        text=True,
        stdout=pipe,
        stderr=pipe,
        # As at a terminal: what a shell has begun in the background does not hear Ctrl-C, nor what that starts.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_program_trains_with_a_function_of_its_own_file_and_goes_on_in_a_second_start(
    folder: Path, steps: int
) -> None:
    """Where the second start asks for no further step, it has the result at once."""
    out, err = start(folder, TRAINS % steps).communicate(timeout=250)

    told: dict[str, Any] = json.loads(out)
    assert [number for number, _ in told["steps"]] == [1, 2], err
    assert all(0.0 <= reward <= 1.0 for _, reward in told["steps"])
    assert (told["first"], told["second"], told["clean"], told["found"]) == ("finished", steps, True, True)
    assert told["rewards"] == ["near"]
    transformers.AutoModelForCausalLM.from_pretrained(told["export"])


def test_a_program_that_is_killed_leaves_a_checkpoint_and_nothing_that_runs(folder: Path) -> None:
    with start(folder, GOES_ON) as program:
        assert program.stdout is not None
        first = program.stdout.readline()
        assert first == "1\n", program.stderr
        assert len(processes_in(folder)) > 1, "the program and its run"
        program.kill()
        program.wait(timeout=60)
        wait_until(lambda: processes_in(folder) == [], description="no process of the run", timeout_s=240)

    assert json.loads((folder / "runs" / "whole" / "state.json").read_text())["state"] == "stopped"


def test_a_reward_that_fails_is_one_error_of_the_program_and_leaves_nothing(folder: Path) -> None:
    out, err = start(folder, FAILS).communicate(timeout=240)

    assert out.startswith("DataError rewards.broken.target = 'runs/whole/rewards/broken.pkl:broken' fails for data/"), (
        err
    )
    assert "TypeError: string indices must be integers" in out
    assert "(program.py:12: return [float(one) for one in answer[0]" in out
    assert out.count("\n") == 1
    assert err == ""
    assert not (folder / "runs").exists() or list((folder / "runs").iterdir()) == []


@pytest.mark.long
def test_a_program_that_is_interrupted_has_its_run_write_a_checkpoint_before_it_ends(folder: Path) -> None:
    with start(folder, GOES_ON) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=240)

    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert json.loads((folder / "runs" / "whole" / "state.json").read_text())["state"] == "stopped"
