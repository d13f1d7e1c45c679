"""The metrics' file on a disk that becomes full: what does not get in whole leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from streamrl.learner.metrics.record import Recorder
from tests.helpers import files_up_to


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
