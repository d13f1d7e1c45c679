"""multiprocessing's fork server as a fork of this process, which has imported already what the server would import.

By itself it is a program of its own, and begins with all its imports. As a fork it has of this process the modules and
the standard streams alone: no other file, no handler of a signal. Only for a process of one thread: what others hold,
such as a lock, a fork would keep for ever.
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


def has_one_thread() -> bool:
    """By the kernel's count, with those that Python does not know. Where that is not told: False."""
    return _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1


@contextmanager
def forking_server() -> Iterator[None]:
    """Inside the context `multiprocessing.forkserver.ensure_running` forks."""
    multiprocessing.resource_tracker.ensure_running()  # which it would begin, too: a program all the same
    theirs = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _fork
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = theirs


def _fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of a program at `path`, `python -c CODE`, which inherits these files."""
    pid = os.fork()
    if pid == 0:
        _become(args[-1], passfds)
    return pid


def _become(code: str, descriptors: Sequence[int]) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # What is due at the end of this process's parent is not due here, nor when these are forgotten.
        not_ours = list(multiprocessing.util._finalizer_registry.values())  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        _close_all_but({*_STANDARD_STREAMS, *descriptors})
        # As it is in a program that begins: here it is locked, since this process is in the midst of starting a server.
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
        exec(code, {"__name__": "__main__", "not_ours": not_ours})  # the standard library's own words
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except Exception:  # noqa: BLE001 - the edge of a process: what is behind it is another's
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:  # that of the listing itself
                continue
