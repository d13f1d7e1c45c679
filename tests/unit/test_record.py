"""The files of metrics and validations: what a full disk takes not whole leaves nothing, and what is long is cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from structlog.testing import capture_logs

from streamrl.learner.groups.prompts import Prompt
from streamrl.learner.metrics.record import Recorder, ValidationResult
from tests.helpers import files_up_to, make_sample


class Nowhere:
    """Redis, as far as recording goes; and the tokenizer, which is not asked."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        raise AssertionError("nothing to decode")


def test_a_line_that_does_not_fit_leaves_no_half_behind(tmp_path: Path) -> None:
    recorder = Recorder(folder=tmp_path, journal=Nowhere(), decoder=Nowhere(), term=1)
    path = tmp_path / "metrics.jsonl"
    recorder.step(1, {"timers/step": 1.0})
    with capture_logs() as logs, files_up_to(path.stat().st_size + 20):
        recorder.step(2, {"timers/step": 1.0})
    recorder.step(3, {"timers/step": 1.0})
    assert [entry["event"] for entry in logs] == ["record not written"]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


class Digits(Nowhere):
    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return "7" * len(token_ids)


def shown(folder: Path, *, text: str, fields: Mapping[str, Any], num_tokens: int) -> list[dict[str, Any]]:
    """What a validation of eight such prompts leaves to be read."""
    prompt = Prompt(line=1, text=text, token_ids=np.array([1], dtype=np.int32), fields=fields)
    answers = ((prompt, make_sample(num_tokens=num_tokens)),) * 8
    result = ValidationResult(step=1, version=1, complete=True, metrics={}, shown=answers)
    Recorder(folder=folder, journal=Nowhere(), decoder=Digits(), term=1).validation(result)
    [line] = (folder / "validation.jsonl").read_text().splitlines()
    samples: list[dict[str, Any]] = json.loads(line)["samples"]
    return samples


def test_what_a_validation_shows_is_whole_if_it_is_short(tmp_path: Path) -> None:
    fields = {"answer": "4", "metadata": {"terms": [2, 2]}}
    [first, *_] = shown(tmp_path, text="2+2=", fields=fields, num_tokens=3)
    assert first == {"prompt": "2+2=", "completion": "777", "reward": 1.0, "fields": fields}


def test_what_a_validation_shows_of_long_texts_is_cut_and_short_fields_stay_whole(tmp_path: Path) -> None:
    fields = {"context": "c" * 1_000_000, "notes": ["n" * 1_000_000], "answer": "4", "level": 3}
    [first, *_] = shown(tmp_path, text="t" * 1_000_000, fields=fields, num_tokens=100_000)
    assert (tmp_path / "validation.jsonl").stat().st_size < 100_000
    assert (first["fields"]["answer"], first["fields"]["level"]) == ("4", 3)
    assert first["fields"]["context"].endswith("c…")
    assert first["fields"]["notes"].startswith('["nnn')
    assert (first["prompt"], first["completion"]) == ("t" * 4000 + "…", "7" * 4000 + "…")
