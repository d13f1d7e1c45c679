"""`streamrl doctor CONFIG --gpus N`: a layout for GPUs that are not here, by a model's configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench.memory_cases import model_config
from streamrl.config.load import load_config
from streamrl.ops.cli.main import main


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Of a run whose data are elsewhere, and its model's weights too."""
    model_config("30B-A3B").save_pretrained(tmp_path / "model")
    path = tmp_path / "run.yaml"
    path.write_text(f"""\
model: {{path: {tmp_path / "model"}}}
data: {{train: elsewhere.jsonl}}
rewards: {{exact: {{type: function, target: exact_match}}}}
algorithm: {{kl: {{placement: none}}}}
training: {{micro_batch_tokens: 8192}}
learner: {{layout: {{experts: 3}}}}
""")
    return str(path)


def test_a_layout_is_planned_where_there_is_no_gpu_and_can_be_pasted(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", file, "--gpus", "8", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    first, *others = told["findings"]
    assert told["worst"] == first["level"] == "ok"
    assert first["name"] == "layout"
    pasted = yaml.safe_load(first["remedy"])["learner"]
    learner = load_config(file, [f"learner={json.dumps(pasted)}"]).config.learner
    assert (learner.processes, learner.layout.experts) == (8, 8)
    assert all(other["name"] == "layout, why not" for other in others)


def test_what_fits_nowhere_is_an_error_in_lines_for_people(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", file, "--gpus", "2", "--gpu-memory", "24"]) == 2

    told = capsys.readouterr().out
    assert told.startswith("ERROR    layout             none of 2 GPUs fits: the smallest, ")
    assert f"{'':<28}with 64 GPUs: " in told


def test_gpus_that_hosts_cannot_have_are_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", file, "--gpus", "12"]) == 2
    assert "error: --gpus 12 is not a multiple of --gpus-per-host 8: " in capsys.readouterr().err


def test_a_model_that_is_not_here_is_told_what_to_fetch_of_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", file, "model.path=nobody/has-this", "--gpus", "8"]) == 2

    told = capsys.readouterr().out
    assert "'nobody/has-this' is not on this machine: planning a layout needs its config.json" in told
    assert "`hf download nobody/has-this --include '*.json'`" in told
