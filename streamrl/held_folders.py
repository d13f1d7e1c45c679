"""Folders in shared places, /tmp and /dev/shm: each belongs to one process, and is removed with it.

    mirror    /dev/shm/streamrl-mirror-RUN-WORKER   the weights that a worker serves, as large as the model
    scratch   /tmp/streamrl-scratch-xxxxxxxx        sockets and files that vLLM or torchrun create and leave behind
    share     /dev/shm/streamrl-share-USER-RUN      what the workers of one run and host have fetched for each other

The owner of a folder holds the lock in it, and removes the folder when done; of a share's several holders the last one
does. A killed process leaves its folder behind, so before creating one we remove those of this user's dead processes;
the launcher does so at its end, too. Blocks for a few seconds at most, while others start at the same moment.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

from streamrl.errors import ResourceError
from streamrl.files import locked, take_lock

_MIRROR = "streamrl-mirror-"
_SCRATCH = "streamrl-scratch-"
_SHARE = "streamrl-share-"
_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = Path("/tmp")
# A socket path has at most 107 bytes. This leaves room for the folder's own name, and 38 bytes for a file in it.
_LONGEST_ROOT = 107 - len(_SCRATCH) - 8 - 1 - 38
_LONGEST_WAIT_S = 5.0
_PAUSE_S = 0.02


def mirror_folder(run_uid: str, worker: str, *, root: Path | None = None) -> AbstractContextManager[Path]:
    """Hold a worker's mirror folder, whose name is fixed so that two workers of one name do not patch one mirror."""
    name = _MIRROR + re.sub(r"[^A-Za-z0-9._-]", "_", f"{run_uid}-{worker}")
    taken = f"another worker of this run is alive on this machine under the name {worker!r}: give each worker a "
    return _held((root or _memory()) / name, taken=f"{taken}--worker-id of its own")


def scratch_folder(*, in_memory: bool = False, root: Path | None = None) -> AbstractContextManager[Path]:
    """Hold a folder with a new, short name, on a memory file system if requested and available."""
    root = root or (_memory() if in_memory else _temporary())
    name = _SCRATCH + secrets.token_hex(4)
    return _held(root / name, taken=f"{root / name} belongs to another process: try again")


@contextmanager
def share_folder(run_uid: str, *, root: Path | None = None) -> Iterator[Path]:
    """Hold the folder that all processes of this user share for this run."""
    root = root or _memory()
    folder = root / f"{_SHARE}{os.geteuid()}-{re.sub(r'[^A-Za-z0-9._-]', '_', run_uid)}"
    with _one_at_a_time(root):
        _remove_those_of_the_dead(root)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder):
            raise ResourceError(f"{folder} is another user's: remove it, as workers share weights there")
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        with _one_at_a_time(root):
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child shares the descriptor
            os.close(lock)
            last = take_lock(folder / _LOCK) if folder.is_dir() else None
            if last is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(last)


def remove_those_of_the_dead() -> None:
    """Remove folders of dead processes; for a caller that has killed some."""
    for root in {_memory(), _temporary()}:
        with _one_at_a_time(root):
            _remove_those_of_the_dead(root)


def _memory() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else _temporary()


def _temporary() -> Path:
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= _LONGEST_ROOT else _TEMPORARY


@contextmanager
def _held(folder: Path, *, taken: str) -> Iterator[Path]:
    with ExitStack() as stack:
        with _one_at_a_time(folder.parent):
            _remove_those_of_the_dead(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(folder):
                raise ResourceError(f"{folder} is another user's, or a link: remove it")
            stack.enter_context(locked(folder / _LOCK, taken=taken))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Exclude others while a folder is created or removed, so that none is removed before it is locked. A lock held for
    too long is not one of ours, and is ignored."""
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
    for folder in (found for kind in (_MIRROR, _SCRATCH, _SHARE) for found in root.glob(f"{kind}*")):
        with suppress(OSError):  # removed meanwhile
            lock = take_lock(folder / _LOCK) if _is_ours(folder) else None
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                structlog.get_logger().info("removed the folder of a process that was killed", folder=str(folder))


def _is_ours(folder: Path) -> bool:
    """Return whether it is this user's folder, and not another's or a link."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
