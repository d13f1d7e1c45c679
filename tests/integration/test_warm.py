"""Programs that tests fork from a server: they end, print and are killed like any other, and what fails is told."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.warm import Forked, run_ranks, start

_ONCE = ("timeit", "-n", "1", "-r", "1")  # runs a statement
_TAKES_HOURS = (*_ONCE, "import time; time.sleep(3600)")


def program(tmp_path: Path, *words: str) -> tuple[Forked, Path]:
    out = tmp_path / "out"
    with out.open("wb") as file:
        return start(*words, out=file, folder=tmp_path, environment={"PYTHONWARNINGS": "ignore"}), out


def test_a_program_has_its_words_its_folder_and_its_exit_code(tmp_path: Path) -> None:
    done, out = program(tmp_path, "calendar", "1968")
    assert done.wait(60) == 0
    assert "1968" in out.read_text()
    failed, _ = program(tmp_path, *_ONCE, "import os; os._exit(3)")
    assert failed.wait(60) == 3
    assert failed.poll() == 3


def test_a_program_is_waited_for_no_longer_than_is_said_and_can_be_killed(tmp_path: Path) -> None:
    sleeper, _ = program(tmp_path, *_TAKES_HOURS)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.01)
    assert sleeper.poll() is None
    sleeper.kill()
    assert sleeper.wait(60) == -signal.SIGKILL
    sleeper.send_signal(signal.SIGTERM)  # to nobody


def test_a_rank_that_fails_ends_the_others_and_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"No module named tests\.no_such_ranks"):
        run_ranks("tests.no_such_ranks", size=2, out=tmp_path / "logs", timeout_s=240)


def test_ranks_that_do_not_end_are_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"at work for more than 0\.2 s"):
        run_ranks(*_TAKES_HOURS, size=2, out=tmp_path / "logs", timeout_s=0.2)
