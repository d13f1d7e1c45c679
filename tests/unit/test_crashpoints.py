"""Crash points: every name is somewhere in the code, and what is armed happens there and nowhere else."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.crashpoints import POINTS, VARIABLE, CrashAt, Point, SimulatedCrash, armed, crashpoint, parse
from streamrl.errors import ConfigError
from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]
_PASSES = "from streamrl.crashpoints import crashpoint as c; c('file.aside'); c('file.aside'); print('alive')"


def called_points() -> Iterator[str]:
    """The names that the sources pass to `crashpoint`, wherever they do."""
    for room in ("streamrl", "learner", "workers"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "crashpoint":
                    yield ast.literal_eval(node.args[0])


def run(code: str, *, crash_at: str) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: crash_at}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)


def test_every_point_of_the_table_is_in_the_code_and_no_other() -> None:
    assert set(called_points()) == POINTS


def test_a_point_that_is_not_armed_does_nothing() -> None:
    crashpoint("file.aside")
    with armed(CrashAt("file.linked")):
        crashpoint("file.aside")


def test_an_armed_point_crashes_at_its_nth_passing_only() -> None:
    with armed(CrashAt("file.aside", nth=2)):
        crashpoint("file.aside")
        with pytest.raises(SimulatedCrash, match=r"file\.aside"):
            crashpoint("file.aside")
        crashpoint("file.aside")
    crashpoint("file.aside")


def test_an_action_sees_every_point_that_is_passed() -> None:
    passed: list[Point] = []
    with armed(passed.append):
        crashpoint("file.aside")
        crashpoint("file.linked")
    assert passed == ["file.aside", "file.linked"]


def test_what_one_thread_is_armed_with_does_not_end_another() -> None:
    survived = threading.Event()

    def elsewhere() -> None:
        crashpoint("file.aside")
        survived.set()

    with armed(CrashAt("file.aside")):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert survived.is_set()


def test_a_crash_is_no_exception_that_somebody_handles() -> None:
    assert not issubclass(SimulatedCrash, Exception)


def test_a_process_dies_at_the_point_as_by_kill_9() -> None:
    process = run(_PASSES, crash_at="file.aside:2")
    assert process.communicate(timeout=240) == ("", None)
    assert process.returncode == -signal.SIGKILL


def test_a_process_stops_at_the_point_until_it_is_continued() -> None:
    process = run(_PASSES, crash_at="file.aside:2:stop")
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", description="the process is stopped")
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=240) == ("alive\n", None)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("file.asid", r"do you mean file\.aside\?"),
        ("file.aside:0", "with N from 1 on"),
        ("file.aside:x", "with N from 1 on"),
        ("file.aside:1:explode", "with N from 1 on"),
    ],
)
def test_a_word_that_names_no_point_says_what_would(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(word)
