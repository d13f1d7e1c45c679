"""A program's hand on a run that somebody else has started: its state, its end, and the word that ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

import streamrl
from streamrl.errors import PartError
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream


@pytest.fixture
def folder(tmp_path: Path, keys: Keys, redis_url: str) -> Path:
    (tmp_path / "config.yaml").write_text(f"name: {keys.name}\nredis: {{url: '{redis_url}'}}\n")
    return tmp_path


def test_a_run_that_goes_is_told_to_stop_and_has_its_time(learner: LearnerStream, folder: Path, keys: Keys) -> None:
    run = streamrl.attach(folder)
    assert (run.name, run.status().run.state) == (keys.name, "running")
    with pytest.raises(TimeoutError, match="has not ended within 0 s; it goes on"):
        run.wait(timeout=0)

    with pytest.raises(TimeoutError, match="has not stopped in 0 s; the word stands"):
        run.stop(timeout=0)

    assert learner.orders().control == "stop"
    learner.release("stopped")
    assert run.wait(timeout=60).state == "stopped"
    assert run.stop().state == "stopped"


def test_a_run_that_has_failed_raises_that(learner: LearnerStream, folder: Path) -> None:
    run = streamrl.attach(folder)
    learner.release("failed")

    with pytest.raises(PartError, match="failed at step 0"):
        run.wait(timeout=60)
