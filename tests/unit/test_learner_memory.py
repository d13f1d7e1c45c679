"""What the learner will take of its GPU: the closed form agrees with the learner's own code, and refuses in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.memory import planned
from bench.memory_cases import CASES
from bench.memory_run import run
from streamrl.config.load import load_config
from streamrl.learner.preflight import examine
from tests.gpus_world import machine_with
from tests.stand_ins import make_stand_in

CONF = Path(__file__).parents[2] / "conf"
SHORT = CASES["1.5B full, 1 GPU, short"]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_closed_form_is_within_a_tenth_of_what_the_learners_code_holds(checkpointing: bool) -> None:
    case = replace(SHORT, checkpointing=checkpointing)
    measured = run(case)

    assert planned(case).peak == pytest.approx(max(measured.values()), rel=0.1)
    assert planned(case).always + planned(case).step == pytest.approx(measured["step"], rel=0.01)


def test_more_ranks_and_checkpointing_take_less_and_adapters_least() -> None:
    full = CASES["7B full, 4 GPUs"]
    assert planned(replace(full, ranks=8)).peak < planned(full).peak < planned(replace(full, checkpointing=False)).peak
    assert planned(replace(full, ranks=1, lora=True)).always < planned(replace(full, ranks=1)).always / 3


@pytest.mark.parametrize(
    ("gigabytes", "level", "told"),
    [
        (80, "ok", "37.9 GB a rank at its peak, by calculation, 42.7 GB to have on GPU 0"),
        (24, "error", "to have on GPU 0"),
    ],
)
def test_a_learner_that_does_not_fit_is_refused_before_its_weights_are_loaded(
    gigabytes: int, level: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.gpus.version", lambda _name: "2.13.0+cu130")
    monkeypatch.setenv("PATH", machine_with(tmp_path, 1, mebibytes=gigabytes * 1019)["PATH"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "3 + 4 ="}], "answer": "7"}\n' * 64)
    model = make_stand_in(tmp_path / "model", "1.5B")
    asked = [f"model.path={model}", f"data.train={prompts}", f"data.validation={prompts}"]
    findings = {one.name: one for one in examine(load_config(CONF / "gpu_qwen_1.5b.yaml", asked).config)}
    found = findings["learner on GPU"]
    assert found.level == level
    assert told in found.evidence
