"""The folder of a worker's mirror, in shared memory: this worker's alone while it lives.

A worker that is killed leaves its mirror, which is as large as the model, and the machine would lack that memory for
good. So each worker that starts removes the mirrors of this user's dead ones: whoever lives holds its folder's lock.
Blocks for a few seconds at most, where others start at the same moment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import structlog

from streamrl.errors import ResourceError
from streamrl.weights.mirror_place import PREFIX, mirror_place, mirror_root

_LOCK = "lock"
_LONGEST_WAIT_S = 5.0
_PAUSE_S = 0.02


@contextmanager
def mirror_folder(run_uid: str, worker: str, *, root: Path | None = None) -> Iterator[Path]:
    root = root or mirror_root()
    folder = mirror_place(run_uid, worker, root=root)
    with _one_at_a_time(root):
        _remove_those_of_the_dead(root)
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = _locked(folder)
    if lock is None:
        raise ResourceError(
            f"another worker of this run is alive on this machine under the name {worker!r}: give each worker a "
            "--worker-id of its own"
        )
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Nobody removes a folder that another has made and not locked yet. Who holds this for long is no worker, and is
    not waited for."""
    directory = os.open(root, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(directory)


def _remove_those_of_the_dead(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone by now
            lock = _locked(folder)
            if lock is not None:
                with lock:
                    shutil.rmtree(folder, ignore_errors=True)
                structlog.get_logger().info("removed the mirror of a worker that was killed", folder=str(folder))


def _locked(folder: Path) -> IO[str] | None:
    """Its lock, or None where a living process holds it."""
    lock = (folder / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
