"""Kills a rank that has been stopped (SIGSTOP) for some seconds, so that torchrun restarts the ranks.

A stopped rank cannot help itself, and its peers only see a collective that does not return: until the process group's
timeout, after which torchrun still asks the stopped rank to end before it kills it. So each rank has a guardian, a
small process that checks the rank's state once a second:

    rank ◄── /proc/PID/stat: T, and T again, until the limit ──► SIGKILL ──► the agent restarts all ranks

It needs no peers and no network, works on each host alone, and unlike a heartbeat cannot take a busy rank for a stopped
one. A rank stopped together with its guardian (Ctrl-Z, a frozen container) is left alone: fencing makes that harmless.
A debugger's stop has a different state. Linux only, like dying with the parent; elsewhere there is no guardian, and the
watchdog's limit holds.

The guardian runs this file by its path, without site packages, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_STOPPED = "T"


@contextmanager
def guarded(*, limit_s: float, check_every_s: float = 1.0) -> Iterator[None]:
    """Inside the block, kill this process once it has been stopped for `limit_s`."""
    if sys.platform != "linux":
        yield
        return
    arguments = [str(os.getpid()), str(limit_s), str(check_every_s)]
    guardian = subprocess.Popen([sys.executable, "-I", "-S", __file__, *arguments], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        guardian.kill()
        guardian.wait()


def _guard(rank: int, *, limit_s: float, check_every_s: float) -> None:
    """The guardian's loop; ends with the rank."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the rank, which may take long to drain
        signal.signal(number, signal.SIG_IGN)
    num_stopped = (
        0  # checks in a row that saw it stopped; not a time, since clocks run on while the guardian is stopped
    )
    while os.getppid() == rank:
        num_stopped = num_stopped + 1 if _state(rank) == _STOPPED else 0
        if num_stopped * check_every_s > limit_s:
            print(f"rank with pid {rank} was stopped for {limit_s:g} s: killing it for a restart", file=sys.stderr)
            os.kill(rank, signal.SIGKILL)
            return
        time.sleep(check_every_s)


def _state(pid: int) -> str:
    """The process's state letter in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    _guard(int(sys.argv[1]), limit_s=float(sys.argv[2]), check_every_s=float(sys.argv[3]))
