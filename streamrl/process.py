"""Process-level resources: freed memory, listening ports, stdout, and child processes that end with their parent.

glibc returns large blocks and the free end of its heap to the system at once, and gets them back page by page, zeroed
by the kernel. CPU forward passes free and allocate the same megabytes at every layer: for a small model with a thousand
tokens in a batch this is a sixth of the time. The exact share depends on what happens to be at the end of the heap, so
it differs between process starts.

A port is bound before anything slow is done, so that a port in use fails at once.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from streamrl.errors import ConfigError, ResourceError

# torch's own format imports its compiler to show an exception, for ten seconds and more.
_LOG_FORMAT = {"TORCH_LOGS_FORMAT": "%(asctime)s %(levelname)s %(name)s: %(message)s"}
# Micro-batches allocate ever-changing sizes; without expandable segments they fragment GPU memory.
_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_OLD_ALLOCATOR_NAME = "PYTORCH_CUDA_ALLOC_CONF"  # which torch still reads

_PORTS_OF_THE_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_BY_STANDARD = 49152  # of the ports that a system hands out (RFC 6335)
_LOWEST_OF_USERS = 1024  # below it, only root may bind
_PORTS_TRIED = 100

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.2
# From <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Let the process keep memory that it has used once. Does nothing without glibc.

    Call it before threads start: they keep their existing arenas, and a thread's arena holds 64 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_ARENA_MAX, 1)


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int, *, what: str) -> socket.socket:
    """Bind a socket; port 0 takes any free one. `what` names its purpose in errors."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # Pass the protocol: asyncio sets TCP_NODELAY only if it sees TCP; otherwise answers take 40 ms longer.
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


def free_port(host: str, *, handed_out: Path = _PORTS_OF_THE_SYSTEM) -> int:
    """Return a port for a program that binds it later, and must be told before.

    Nothing listens there, and the system gives it to nobody: it is below the range from which connections and port 0
    are served, one of which may take any port of that range while the program starts. Where that range (read from
    `handed_out`) leaves none, it is one of the range.
    """
    try:
        lowest = int(handed_out.read_text().split()[0])
    except OSError:  # not Linux
        lowest = _LOWEST_BY_STANDARD
    below = range(max(lowest // 2, _LOWEST_OF_USERS), lowest)
    for port in random.SystemRandom().sample(below, min(_PORTS_TRIED, len(below))):
        with suppress(ResourceError), bind(host, port, what="a free port"):
            return port
    with bind(host, 0, what="a free port") as bound:
        return int(bound.getsockname()[1])


def address_of(bound: socket.socket, *, host: str | None = None) -> str:
    """Return HOST:PORT for a URL; the host as given, or by default the socket's."""
    found, port = bound.getsockname()[:2]
    host = host or found
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str, *, what: str) -> tuple[str, int]:
    """Parse HOST:PORT, or [HOST]:PORT for a host with colons. `what` names its purpose in errors."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{what} {text!r}: must be HOST:PORT, such as 127.0.0.1:9400; port 0 takes any free one")
    return host.removeprefix("[").removesuffix("]"), int(port)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even by kill -9. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_by_torch(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a learner's variables that torch reads at its import; what the user has set wins."""
    wanted = _LOG_FORMAT | ({} if _OLD_ALLOCATOR_NAME in environment else _ALLOCATOR)
    return {name: value for name, value in wanted.items() if name not in environment}


def threads_in(environment: Mapping[str, str]) -> int | None:
    """Return the threads that OMP_NUM_THREADS gives a process, or None. torch reads it at its import, so a process that
    is forked after the import, in another environment, has to set it."""
    outermost = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(outermost) if outermost.isdecimal() else None


def change_environment(wanted: Mapping[str, str]) -> None:
    """Make this process's environment equal to `wanted`, touching only variables that differ: replacing all of it would
    move it in memory, and vLLM writes the process title (`VLLM::EngineCore`) where it was.
    """
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def signals_to_end() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to end. Under `nohup`, the end of the terminal does not."""
    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return asking[:-1] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else asking


def take_stdout() -> TextIO:
    """Return a stream to the parent process, and redirect all other prints, user code's too, to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lines


def ask_to_end_with(parent: int) -> None:
    """Send this process a SIGHUP when its parent is gone, so that it can shut down in order: the signal that is never
    taken for a second request, as the parent may have sent a first one. Unlike the kernel's signal, this does not
    depend on which of the parent's threads started it. Call it in the main thread, before anything counts signals."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGHUP)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # heed it also where the parent was started by nohup
    threading.Thread(target=watch, name="looks for the parent", daemon=True).start()


def started_at(pid: int) -> str:
    """Return the process's start time as the kernel prints it; "" if it does not exist. Guards against pid reuse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


# Requests a signal at the parent's death, then execs the command. A separate program rather than a preexec_fn, which
# may deadlock in a process with threads. Only the thread that starts a child counts as its parent.
_EXEC_AND_DIE_WITH_PARENT = """
import ctypes, os, sys
parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, number)
if os.getppid() != parent:
    sys.exit("the parent process has ended")
os.execv(command[0], command)
"""


def dying_with_us(command: Sequence[str], *, by: signal.Signals) -> list[str]:
    """Return the command line of a child that gets this signal when the thread that starts it ends."""
    program = [sys.executable, "-I", "-S", "-c", _EXEC_AND_DIE_WITH_PARENT, str(os.getpid()), str(int(by))]
    return [*program, *command]
