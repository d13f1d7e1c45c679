"""One process at a time runs a run's folder: a launcher, or a replay. The kernel frees the lock with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from streamrl.errors import ResourceError

LOCK = "up.lock"  # within the folder


@contextlib.contextmanager
def only_one(lock: Path, name: str) -> Iterator[None]:
    """Inside, no other launcher runs this folder, however the last one ended."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 20, 0).decode() or "unknown"
            raise ResourceError(
                f"the run {name!r} is live: another process (pid {pid}) runs {lock.parent}; "
                "end it with Ctrl-C, or choose another name with name=..."
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
