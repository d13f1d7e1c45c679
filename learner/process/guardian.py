"""Kills this rank when it has been stopped (SIGSTOP) for some seconds, so that torchrun restarts it like a dead one.

A stopped rank cannot help itself, and its peers only see a collective that does not return: until the process group's
timeout, and then torchrun asks the stopped one to end before it kills it. So each rank has a guardian, a small process
of its own that does nothing but look at the rank's state once a second:

    rank ◄── /proc/PID/stat: T, and T again, for so long ──► SIGKILL ──► the agent restarts all ranks

It needs no peers and no network, works on each host alone, and cannot take a busy rank for a stopped one, as a
heartbeat could. What is stopped together with its guardian (Ctrl-Z, a frozen container) is left alone: the fence makes
that harmless. A debugger's stop has another letter. Linux only, as is dying with the parent; elsewhere there is no
guardian, and the watchdog's limit holds.

The guardian runs this very file by its path, without site packages, so it imports the standard library alone.
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
def guarded(*, limit_s: float, look_every_s: float = 1.0) -> Iterator[None]:
    """Until the block ends, this process may be stopped for `limit_s` and no longer."""
    if sys.platform != "linux":
        yield
        return
    words = [str(os.getpid()), str(limit_s), str(look_every_s)]
    guardian = subprocess.Popen([sys.executable, "-I", "-S", __file__, *words], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        guardian.kill()
        guardian.wait()


def _guard(rank: int, *, limit_s: float, look_every_s: float) -> None:
    """In the guardian: until the rank ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the rank, which may take long to drain
        signal.signal(number, signal.SIG_IGN)
    num_looks = 0  # in a row at which it was stopped; a count, since our own clock runs on while we are stopped too
    while os.getppid() == rank:
        num_looks = num_looks + 1 if _state(rank) == _STOPPED else 0
        if num_looks * look_every_s > limit_s:
            print(f"rank with pid {rank} was stopped for {limit_s:g} s: killing it, to be restarted", file=sys.stderr)
            os.kill(rank, signal.SIGKILL)
            return
        time.sleep(look_every_s)


def _state(pid: int) -> str:
    """The letter that the kernel gives its state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    _guard(int(sys.argv[1]), limit_s=float(sys.argv[2]), look_every_s=float(sys.argv[3]))
