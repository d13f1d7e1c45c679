"""Files and folders that are there whole or not at all, also after a power cut: write aside, fsync, rename, fsync the
folder. And locks on them.

Blocks on the disk only. Whoever announces a file (in Redis, or by the name of a folder) calls one of these first.

Folders in places that all users share, /tmp and /dev/shm: each is one process's alone, and goes with it.

    mirror    /dev/shm/streamrl-mirror-RUN-WORKER   the weights that a worker serves, as large as the model
    scratch   /tmp/streamrl-scratch-xxxxxxxx        sockets and files that vLLM or torchrun make and leave behind
    share     /dev/shm/streamrl-share-USER-RUN      what the workers of one run and host fetched for each other

Who holds a folder holds the lock in it, and removes the folder when done; of a share's many holders the last does. A
process that is killed leaves its folder, so whoever makes one removes those of this user's dead first, and so does the
launcher at its end. Blocks for a few seconds at most, where others start at the same moment.

One process at a time runs a run's folder: a launcher, or a replay. The kernel frees the lock with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

from streamrl.crashpoints import crashpoint
from streamrl.errors import ResourceError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # what NFS and old kernels answer


def first_there(path: Path) -> Path:
    """It, or the nearest folder above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def check_writable(folder: Path, *, what: str) -> None:
    """ResourceError where it is neither a folder that can be written to nor can be made one; nothing is made."""
    there = first_there(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written to" if there.is_dir() else "is no folder"
        raise ResourceError(f"{what}: {there} {reason}; choose another place, or mend its permissions")


def fsync_file(path: Path) -> None:
    """Wait until the file's contents are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in this folder are on the disk: a rename is not durable before that."""
    fsync_file(folder)


def fsync_tree(folder: Path) -> None:
    """Wait until all that the folder holds, at any depth, is on the disk."""
    for path in (*folder.rglob("*"), folder):
        fsync_file(path)


def replace_folder(made: Path, folder: Path) -> None:
    """Give the folder that was made, beside it, this name, and remove what had it. One of the two has it all the time;
    where the file system cannot exchange names there is a moment when none has, and the next call puts back what a
    crash in that moment has left as `.old-NAME`."""
    old = folder.with_name(f".old-{folder.name}")
    if old.exists() and not folder.exists():
        old.rename(folder)
    fsync_tree(made)
    crashpoint("file.aside")
    if not folder.exists():
        made.rename(folder)
    elif not _exchange(made, folder):
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        crashpoint("file.aside")
        made.rename(folder)
    crashpoint("file.renamed")
    fsync_folder(folder.parent)
    for replaced in (made, old):
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False where that cannot be."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    if (error := ctypes.get_errno()) in _NO_EXCHANGE:
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file by these contents; a reader sees the old ones or the new ones."""
    aside = _write_aside(path, data)
    try:
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    crashpoint("file.renamed")
    fsync_folder(path.parent)


def create_exclusively(path: Path, data: bytes) -> bool:
    """Create the file with these contents unless it exists; exactly one of several callers gets True.

    A hard link rather than O_EXCL, since it fails in the same way when the name is taken, but the name never stands for
    contents that are half written.
    """
    aside = _write_aside(path, data)
    try:
        os.link(aside, path)
        crashpoint("file.linked")
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True


def _write_aside(path: Path, data: bytes) -> Path:
    aside = path.parent / f".tmp-{path.name}-{uuid.uuid4().hex[:12]}"
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        aside.unlink(missing_ok=True)
        error.filename = str(path)  # that of the other says nothing to anybody, and a full disk names none
        raise
    crashpoint("file.aside")
    return aside


def take_lock(path: Path) -> int | None:
    """The lock of a file, or of a folder, for as long as this descriptor is open: the kernel frees it with the process,
    however that ends. None where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def locked(path: Path, *, taken: str) -> Iterator[None]:
    """Inside, nobody else holds the lock of this file or folder; where somebody does, ResourceError says `taken`."""
    descriptor = take_lock(path)
    if descriptor is None:
        raise ResourceError(taken)
    try:
        yield
    finally:
        os.close(descriptor)


_MIRROR = "streamrl-mirror-"
_SCRATCH = "streamrl-scratch-"
_SHARE = "streamrl-share-"
_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = Path("/tmp")
# The kernel takes 107 bytes for a socket. This leaves room for the folder's own name, and 38 for what lies in it.
_LONGEST_ROOT = 107 - len(_SCRATCH) - 8 - 1 - 38
_LONGEST_WAIT_S = 5.0
_PAUSE_S = 0.02


def mirror_folder(run_uid: str, worker: str, *, root: Path | None = None) -> AbstractContextManager[Path]:
    """Of this name, so that two workers that are called the same do not patch one mirror."""
    name = _MIRROR + re.sub(r"[^A-Za-z0-9._-]", "_", f"{run_uid}-{worker}")
    taken = f"another worker of this run is alive on this machine under the name {worker!r}: give each worker a "
    return _held((root or _memory()) / name, taken=f"{taken}--worker-id of its own")


def scratch_folder(*, in_memory: bool = False, root: Path | None = None) -> AbstractContextManager[Path]:
    """Of a new and short name, on a memory file system where there is one and that is asked for."""
    root = root or (_memory() if in_memory else _temporary())
    name = _SCRATCH + secrets.token_hex(4)
    return _held(root / name, taken=f"{root / name} is another process's: begin again")


@contextmanager
def share_folder(run_uid: str, *, root: Path | None = None) -> Iterator[Path]:
    """The same one for all processes of this user that name this run."""
    root = root or _memory()
    folder = root / f"{_SHARE}{os.geteuid()}-{re.sub(r'[^A-Za-z0-9._-]', '_', run_uid)}"
    with _one_at_a_time(root):
        _remove_those_of_the_dead(root)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder):
            raise ResourceError(f"{folder} is another user's: remove it, for workers share weights there")
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        with _one_at_a_time(root):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
            os.close(lock)
            last = take_lock(folder / _LOCK) if folder.is_dir() else None
            if last is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(last)


def remove_those_of_the_dead() -> None:
    """For who has killed processes that held folders."""
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
            stack.enter_context(locked(folder / _LOCK, taken=taken))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Nobody removes a folder that another has made and not locked yet. Who holds this for long is none of ours, and is
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
    for folder in (found for kind in (_MIRROR, _SCRATCH, _SHARE) for found in root.glob(f"{kind}*")):
        with suppress(OSError):  # gone by now
            lock = take_lock(folder / _LOCK) if _is_ours(folder) else None
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                structlog.get_logger().info("removed the folder of a process that was killed", folder=str(folder))


def _is_ours(folder: Path) -> bool:
    """No other user's, and no link of theirs to somewhere else."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


LOCK = "up.lock"  # within the folder


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Inside, no other launcher runs this folder, however the last one ended."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK
    pid = lock.read_text() if lock.exists() else ""
    taken = (
        f"the run {name!r} is live: another process (pid {pid or 'unknown'}) runs {folder}; "
        "end it with Ctrl-C, or choose another name with name=..."
    )
    with locked(lock, taken=taken):
        lock.write_text(str(os.getpid()))
        yield
