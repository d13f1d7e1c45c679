"""What a run to which everything happened is said to have left behind: its own, whatever else is at work beside it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults.random_leaks import Footprint, shared_by_others
from tests.faults.random_outcome import Leaks
from tests.helpers import wait_until

# Its parent is gone, so it is nobody's below us; the name that glibc maps is not the one that it gives its semaphore.
STRANGER = """
import multiprocessing, os, pathlib, signal, sys
if os.fork():
    os._exit(0)
held = [multiprocessing.get_context("spawn").Semaphore() for _ in range(3)]
lock = open(sys.argv[2] + "/lock", "w")
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""


@contextmanager
def stranger(folder: Path) -> Iterator[int]:
    """One with three semaphores, and a folder in shared memory; its process."""
    file = folder / "pid"
    with tempfile.TemporaryDirectory(prefix="streamrl-mirror-test-", dir="/dev/shm") as held:
        subprocess.run([sys.executable, "-c", STRANGER, str(file), held], check=True, timeout=240)
        pid = int(wait_until(lambda: file.exists() and file.read_text(), description="the stranger is at work"))
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def leaks(before: Footprint, strangers: set[int]) -> Leaks:
    return before.leaks_since(strangers, num_keys=0, num_descriptors_of_parts=0)


def test_what_a_stranger_shares_is_not_ours_while_it_lives_and_when_it_is_killed(tmp_path: Path) -> None:
    before, strangers = Footprint.now(), set[int]()
    with stranger(tmp_path):
        assert leaks(before, strangers).shared_memory == 0
        strangers |= shared_by_others()
    assert leaks(before, strangers).shared_memory == 0


def test_a_semaphore_of_ours_that_stays_is_a_leak() -> None:
    before = Footprint.now()
    mine = multiprocessing.get_context("spawn").Semaphore()
    assert leaks(before, set()).shared_memory == 1
    del mine
    assert leaks(before, set()).shared_memory == 0
