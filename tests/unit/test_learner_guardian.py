"""A rank that is stopped for too long is killed; one that is stopped for a moment, or not at all, is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]
_LIMIT_S = 0.3

# Says where its guardian is, works for as long as it is told, and says that it has come to its end.
_RANK = f"""
import sys, threading
from streamrl.learner.process.guardian import guarded
work_s = float(sys.argv[1])
with guarded(limit_s={_LIMIT_S}, check_every_s=0.05):
    print("working", flush=True)
    threading.Event().wait(work_s)
print("done", flush=True)
"""


@contextmanager
def rank(*, work_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process that is guarded, and at work."""
    command = [sys.executable, "-c", _RANK, str(work_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
            yield process
        finally:
            process.kill()


def guardians_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_stays_stopped_is_killed() -> None:
    with rank(work_s=60) as process:
        process.send_signal(signal.SIGSTOP)
        assert process.wait(20) == -signal.SIGKILL


def test_a_rank_that_works_for_longer_than_the_limit_is_left_alone() -> None:
    with rank(work_s=3 * _LIMIT_S) as process:
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "done\n"


def test_a_rank_that_was_stopped_together_with_its_guardian_goes_on() -> None:
    with rank(work_s=1.0) as process:
        [guardian] = guardians_of(process)
        os.kill(guardian, signal.SIGSTOP)  # the first to stop, and the last to go on: it never sees its rank stopped
        process.send_signal(signal.SIGSTOP)
        assert not _ends_within(process, 3 * _LIMIT_S)
        process.send_signal(signal.SIGCONT)
        os.kill(guardian, signal.SIGCONT)
        assert process.wait(20) == 0


def test_the_guardian_ends_with_its_rank_however_that_ends() -> None:
    with rank(work_s=60) as process:
        [guardian] = guardians_of(process)
        process.kill()
        wait_until(lambda: not is_alive(guardian), description="the guardian has ended")


def _ends_within(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
