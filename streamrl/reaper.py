"""A process above a program that nobody vouches for: it adopts what the program leaves behind, and ends all of it.

    parent ──► reaper ──► the program ──► what it starts, in sessions of its own too
                 ▲                              │ its parent ends: the kernel gives it to the reaper
                 └──────────────────────────────┘

It does so when the program ends, when it is asked to end (SIGTERM), and when its parent ends; then it ends as the
program did. It runs as a file of its own, without streamrl and site-packages, so that it starts in milliseconds and
stays small. Blocks on the program, and on what it has killed. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STDERR = 2
_UNBURIED = os.WEXITED | os.WNOWAIT  # as long as it is not buried, nobody else gets its pid


def reaped(command: Sequence[str]) -> list[str]:
    """Return the command line of a reaper over this command; it ends when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, which is inherited, nothing can be awaited
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
    reaper, program = os.getpid(), 0
    try:
        program = os.fork()
        if program == 0:
            _become(command, reaper)
        _let_go()
        ended = _await(program)
    finally:
        # From here on it is not interrupted, by a second SIGTERM for instance.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _end_all(program)
    _end_as(ended)


def _become(command: list[str], reaper: int) -> None:
    """Become the program; never return."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == reaper:
            os.execv(command[0], command)
    finally:
        os._exit(1)


def _let_go() -> None:
    """Close all but stderr: the pipes are the program's. A billion numbers may be allowed, so only those in use."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if number != _STDERR:
                os.close(number)


def _await(program: int) -> os.waitid_result:
    """Wait for the program's end, and bury what it has left behind meanwhile."""
    while True:
        ended = os.waitid(os.P_ALL, 0, _UNBURIED)
        assert ended is not None, "it waits until one has ended"
        if ended.si_pid == program:
            return ended
        os.waitpid(ended.si_pid, 0)


def _end_all(program: int) -> None:
    """Kill children until none is left: those of a killed one become the reaper's. Only the reaper buries its children,
    so none of their pids can be somebody else's by then."""
    if program:
        with contextlib.suppress(OSError):  # no session yet
            os.killpg(program, signal.SIGKILL)
        os.kill(program, signal.SIGKILL)
        os.waitid(os.P_PID, program, _UNBURIED)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            for child in _children():
                with contextlib.suppress(PermissionError):  # another user's
                    os.kill(child, signal.SIGKILL)
            os.waitid(os.P_ALL, 0, _UNBURIED)


def _children() -> Iterator[int]:
    """Yield this process's children. Not every kernel lists them (`/proc/PID/task/TID/children`)."""
    mine = os.getpid()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == mine:
                yield int(name)


def _end_as(ended: os.waitid_result) -> None:
    if ended.si_code == os.CLD_EXITED:
        os._exit(ended.si_status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if ended.si_status != signal.SIGKILL:
        signal.signal(ended.si_status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), ended.si_status)


if __name__ == "__main__":
    main()
