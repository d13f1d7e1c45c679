"""The example with a tool on a pretrained model, with the packages that only `.ci/setup demo` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.demos import sums
from streamrl.demos.pretrained import converter, find_gguf, make_model, write_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_pretrained_model_is_trained_with_its_calculator_on_vllm(tmp_path: Path) -> None:
    model = make_model(find_gguf(), tmp_path / "models", converter(tmp_path / "logs", print))
    write_data(tmp_path / "data", sums.entries(1), num_held_out=8, num_train=400)
    settings = {
        "dir": tmp_path,
        "model.path": model,
        "data.train": tmp_path / "data" / "train.jsonl",
        "data.validation": tmp_path / "data" / "validation.jsonl",
        "training.max_steps": 3,
        "training.groups_per_step": 2,
        "checkpoint.every_steps": 3,
        "validation.every_steps": 3,
    }
    words = ["-m", "streamrl.ops.cli.main", "up", "conf/calculator.yaml", "--json"]
    words += [f"{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False
    )

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["state"], summary["steps"], summary["dead"]) == ("finished", 3, 0)
    assert (summary["lost"], summary["twice"], summary["clean"]) == (0, 0, True)
    lines = map(json.loads, (tmp_path / "calculator" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "train_optim/optim_step" in line]
    print(json.dumps(steps[-1]))
    turns = [step["train_rollouts/turns"] for step in steps]
    assert min(turns) > 1.0, "it calls its tool, and goes on with what that tells"
