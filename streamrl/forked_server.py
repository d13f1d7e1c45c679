"""Runs multiprocessing's fork server as a fork of this process, which has already imported what the server needs.

By default the server is a new program that repeats all imports. As a fork it inherits only this process's modules and
standard streams: no other files, no signal handlers. Only a process with one thread forks: a lock held by another
thread would stay locked forever in the fork.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

_THREADS = Path("/proc/self/task")
_STANDARD_STREAMS = (0, 1, 2)


@contextmanager
def forking_server(modules: Sequence[str]) -> Iterator[None]:
    """Make `multiprocessing.forkserver.ensure_running` fork inside this context, if this process has imported these
    modules and has one thread; otherwise the server starts as a program."""
    if not (all(module in sys.modules for module in modules) and _has_one_thread()):
        yield
        return
    multiprocessing.resource_tracker.ensure_running()  # otherwise ensure_running starts it, and it must stay a program
    spawn = multiprocessing.util.spawnv_passfds

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        """Replace spawning `path` with `python -c CODE`; the child inherits these files."""
        pid = os.fork()
        if pid == 0:
            multiprocessing.util.spawnv_passfds = spawn  # for the server's own children
            _become(args[-1], passfds)
        return pid

    multiprocessing.util.spawnv_passfds = fork
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = spawn


def _has_one_thread() -> bool:
    """Return whether the kernel counts one thread, including those unknown to Python; False if it does not say."""
    return _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1


def _become(code: str, descriptors: Sequence[int]) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # The parent's finalizers must not run here, neither at exit nor through garbage collection.
        not_ours = list(multiprocessing.util._finalizer_registry.values())  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        _close_all_but({*_STANDARD_STREAMS, *descriptors})
        # Reset to the state of a new program: the inherited object is locked, since the parent is starting a server.
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
        exec(code, {"__name__": "__main__", "not_ours": not_ours})  # `code` comes from the standard library
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except Exception:  # noqa: BLE001 - the edge of a process: no caller remains
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _close_all_but(keep: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in keep:
            try:
                os.close(descriptor)
            except OSError:  # the descriptor of the listing itself
                continue
