"""The server behind `tests.warm`: imports what a learner needs once, and forks programs that find it imported.

python -m tests.warm_server FD    FD: its end of a socket with message boundaries

A message is a program as JSON, with two descriptors: one for its output, and a pipe for its process id and then its
exit code, a line each. The server ends with the socket, and its programs with the server. A program ends like a
separate interpreter, with everything that libraries do at exit.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from typing import Any

import streamrl.learner.main  # noqa: F401 - preloaded for the programs
from streamrl.process import die_with_parent

_MOST = 1 << 20  # bytes per message


def serve(asked: socket.socket) -> dict[str, Any] | None:
    """In the server: return None at its end. In each forked process: return the program to run."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    told_to: dict[int, int] = {}  # pipes, by process id
    while True:
        readable, _, _ = select.select([asked.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        _tell_of_ends(told_to)
        if asked.fileno() in readable:
            message, files, _, _ = socket.recv_fds(asked, _MOST, 2)
            if not message:
                return None
            out, pipe = files
            server = os.getpid()
            if (pid := os.fork()) == 0:
                for fd in (woken, wakes, pipe, *told_to.values()):
                    os.close(fd)
                asked.close()
                _become_a_program(out, server)
                program: dict[str, Any] = json.loads(message)
                return program
            os.close(out)
            os.write(pipe, f"{pid}\n".encode())
            told_to[pid] = pipe


def _tell_of_ends(told_to: dict[int, int]) -> None:
    for pid in list(told_to):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pipe = told_to.pop(pid)
            os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(pipe)


def _become_a_program(out: int, server: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, standard)
    for fd in (nothing, out):
        os.close(fd)


def run(program: dict[str, Any]) -> None:
    """Run it as `python -m` does."""
    os.environ.clear()
    os.environ.update(program["environment"])
    tempfile.tempdir = None  # determined again from the environment
    os.chdir(program["folder"])
    sys.argv[1:] = program["words"]
    runpy.run_module(program["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    die_with_parent()
    gc.collect()
    gc.freeze()  # otherwise the first collection in a program would copy all shared pages
    if (asked_for := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        run(asked_for)
