"""A reaper ends all that its program starts, whatever of them ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from streamrl.reaper import reaped
from tests.helpers import wait_until
from tests.sandbox_world import children

# A process with a session of its own, whose parent has ended, has another; their pids are in the file.
PROGRAM = """
import os, sys, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.setsid()
        os.fork()
        with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()} ")
        time.sleep(600)
    os._exit(0)
while len(open(sys.argv[1]).read().split()) < 2: time.sleep(0.01)
exec(sys.argv[2])
"""


@contextmanager
def program(file: Path, then: str) -> Iterator[subprocess.Popen[bytes]]:
    file.touch()
    command = reaped([sys.executable, "-c", PROGRAM, str(file), then])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as reaper:
        try:
            yield reaper
        finally:
            for pid in (reaper.pid, *started(file)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def started(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


def are_gone(file: Path) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in started(file))


@pytest.mark.parametrize(
    ("then", "status"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -signal.SIGABRT)],
)
def test_it_ends_as_its_program_does_and_nothing_that_this_has_started_is_left(
    tmp_path: Path, then: str, status: int
) -> None:
    with program(tmp_path / "pids", then) as reaper:
        assert reaper.wait(240) == status
        assert are_gone(tmp_path / "pids")


def test_asked_to_end_it_leaves_nothing(tmp_path: Path) -> None:
    with program(tmp_path / "pids", "time.sleep(600)") as reaper:
        wait_until(lambda: len(started(tmp_path / "pids")) == 2, description="all run")
        [running] = set(children(reaper.pid)) - set(started(tmp_path / "pids"))
        reaper.send_signal(signal.SIGTERM)
        reaper.wait(240)
        assert are_gone(tmp_path / "pids")
        assert not Path(f"/proc/{running}").exists()


def test_it_leaves_nothing_when_its_parent_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    file.touch()
    words = [str(file), "time.sleep(600)"]
    parent = (
        f"import subprocess, sys, time\nfrom streamrl.reaper import reaped\n"
        f"subprocess.Popen(reaped([sys.executable, '-c', {PROGRAM!r}, *{words}]))\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as killed:
        wait_until(lambda: len(started(file)) == 2, description="all run")
        killed.kill()
    wait_until(lambda: are_gone(file), description="all are gone")


def test_a_program_cannot_fork_faster_than_its_reaper_kills(tmp_path: Path) -> None:
    """The runner's parent has always ended already."""
    mark = tmp_path / "runs"
    run = (
        "\nfor _ in range(3000):\n    if os.fork(): os._exit(0)\n    os.setsid()\n"
        f"    open({str(mark)!r}, 'a').close()\n    time.sleep(0.001)"
    )
    with program(tmp_path / "pids", f"os.fork() or exec({run!r})\ntime.sleep(600)") as reaper:
        wait_until(lambda: len(started(tmp_path / "pids")) == 2 and mark.exists(), description="all run")
        reaper.send_signal(signal.SIGTERM)
        reaper.wait(240)
        assert are_gone(tmp_path / "pids")
        assert [file for file in Path("/proc").glob("[0-9]*/cmdline") if str(mark) in _words(file)] == []


def _words(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # it has just ended
        return ""


def test_what_a_program_has_left_behind_is_buried_while_it_runs(tmp_path: Path) -> None:
    """Otherwise it would fill the table of processes."""
    leave = "for _ in range(20):\n    if not os.fork():\n        os.fork()\n        os._exit(0)\n    os.wait()\n"
    then = "print('left', flush=True)\ntime.sleep(600)"
    with program(tmp_path / "pids", leave + then) as reaper:
        assert reaper.stdout is not None
        assert reaper.stdout.readline() == b"left\n"
        wait_until(lambda: len(children(reaper.pid)) <= 3, description="they are buried")
        assert len(children(reaper.pid)) >= 2
