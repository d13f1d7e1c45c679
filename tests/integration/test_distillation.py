"""On-policy distillation of a pretrained model, whole runs: of itself there is nothing to learn, and what was perturbed
comes back to it; with the teacher on the learner's ranks, and on vLLM's own server. With the packages that only
`.ci/setup demo` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from streamrl.demos.pretrained import converter, find_gguf, make_model
from tests.served import Served

_STEPS, _LAST = 12, 3
_CONFIG = """
extends: [reinforce.yaml, recipes/distillation.yaml]
data: {train: train.jsonl, validation: null, max_prompt_tokens: 64}
sampling: {max_tokens: 16}
rewards: {model: null, answer: null}
reward_server: null
optimizer: {lr: 3e-5, min_lr: 3e-5, warmup_steps: 1, weight_decay: 0.0}
training: {groups_per_step: 12, micro_batch_tokens: 2048}
lag: {max_steps: 1}
validation: {every_steps: 0}
worker: {threads: 1, engine_args: {max_model_len: 128}}
learner: {threads: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, one that is perturbed, and prompts."""
    folder = tmp_path_factory.mktemp("distillation")
    made = make_model(find_gguf(), folder, converter(folder / "logs", print))
    model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder / "perturbed")
    transformers.AutoTokenizer.from_pretrained(made).save_pretrained(folder / "perturbed")
    rows = [{"messages": [{"role": "user", "content": f"What is {a} + {b}?"}]} for a in range(20) for b in range(15)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(_CONFIG)
    (folder / "teacher").symlink_to(made)
    return folder


@contextmanager
def on_the_ranks(folder: Path) -> Iterator[str]:
    yield "teacher.path=teacher"


@contextmanager
def on_a_server(folder: Path) -> Iterator[str]:
    options = ("--max-model-len", "128", "--dtype", "bfloat16", "--enforce-eager")
    with Served(folder / "teacher", logs=folder, options=options) as server:
        yield f"teacher={{urls: ['{server.url}']}}"


def distil(folder: Path, name: str, model: str, teacher: str, steps: int) -> list[float]:
    """`loss/teacher_kl` of each step."""
    words = ["run.yaml", f"name={name}", f"model.path={model}", teacher, f"training.max_steps={steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "up", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps_made = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [step["loss/teacher_kl"] for step in steps_made if "loss/teacher_kl" in step]


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("where", [on_the_ranks, on_a_server])
def test_of_itself_a_model_learns_nothing_and_perturbed_it_comes_back(
    folder: Path, where: Any, record_property: Any
) -> None:
    with where(folder) as teacher:
        itself = distil(folder, f"itself-{where.__name__}", "teacher", teacher, 1)
        away = distil(folder, f"perturbed-{where.__name__}", "perturbed", teacher, _STEPS)

    last = sum(away[-_LAST:]) / _LAST
    record_property("figure", f"{where.__name__}: of itself {itself[0]:.4f}, perturbed {away[0]:.2f} to {last:.2f}")
    # The learner's own bfloat16 against itself, or against vLLM's: 0.07 a token, of both signs.
    assert abs(itself[0]) < 0.05
    assert away[0] > 0.2
    assert last < 0.7 * away[0]
