"""What a process takes of its machine: the memory that it has freed, the port that it listens on, and programs that end
with it.

glibc hands large blocks, and the free end of its heap, back to the system at once, and gets them again page by page,
zeroed by the kernel. Forward passes on a CPU free and need the same megabytes at every layer: with a thousand tokens in
a batch of a small model that is a sixth of the time. How much exactly depends on what happens to lie at the end of the
heap, so that each start of a process has a speed of its own.

A port is taken before anything slow is done, so that one which is taken already shows at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from streamrl.errors import ConfigError, ResourceError

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.2
# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """From now on what was needed once stays with the process, for the next time. Does nothing without glibc.

    Best called before there are threads: those keep the arenas that they have, and an arena of a thread holds 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_ARENA_MAX, 1)


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int, *, what: str) -> socket.socket:
    """Port 0: any free one. `what` names in an error who wanted it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # The protocol by name: asyncio sends without delay only where it sees TCP, else an answer takes 40 ms more.
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ResourceError(f"{what}: no such host {host!r}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ResourceError(
            f"{what}: cannot take port {port} of {host}: {error.strerror}; choose another one, or 0 for any free one"
        ) from None
    return bound


def address_of(bound: socket.socket, *, host: str | None = None) -> str:
    """HOST:PORT as a URL has it; the host as it was asked for, by default what the socket says."""
    found, port = bound.getsockname()[:2]
    host = host or found
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, what: str) -> tuple[str, int]:
    """HOST:PORT; [HOST]:PORT where the host has colons of its own. `what` names in an error who wanted it."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{what} {text!r}: must be HOST:PORT, such as 127.0.0.1:9400; port 0 takes any free one")
    return host.removeprefix("[").removesuffix("]"), int(port)


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends, even by kill -9. On Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def signals_to_end() -> tuple[signal.Signals, ...]:
    """Those by which a process is asked to end. Who was started by `nohup` stays when its terminal goes."""
    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return asking[:-1] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else asking


def take_stdout() -> TextIO:
    """What is written there goes to whoever started this process; what else is printed, by user code too, to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lines


def ask_to_end_with(parent: int) -> None:
    """From now on this process gets a SIGTERM when its parent is no more, and so may end in good order. Unlike the
    kernel's word, this is about the process that started it, whichever of its threads that was."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="looks for the parent", daemon=True).start()


def started_at(pid: int) -> str:
    """When this process began, in the kernel's words; "" where there is none. With it a number says which process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


# Becomes the command after asking the kernel for a signal when the parent dies. A program of its own rather than a
# preexec_fn, which may deadlock in a process with threads. Only the thread that starts a child counts as its parent.
_EXEC_AND_DIE_WITH_PARENT = """
import ctypes, os, sys
parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, number)
if os.getppid() != parent:
    sys.exit("the process that wanted this one has ended")
os.execv(command[0], command)
"""


def dying_with_us(command: Sequence[str], *, by: signal.Signals) -> list[str]:
    """The command line of a child that the kernel sends this signal when the thread that starts it ends."""
    program = [sys.executable, "-I", "-S", "-c", _EXEC_AND_DIE_WITH_PARENT, str(os.getpid()), str(int(by))]
    return [*program, *command]
