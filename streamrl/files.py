"""Atomic, durable files and folders, also after a power loss: write aside, fsync, rename, fsync the folder. And file
locks.

Blocks on the disk only. Call one of these before announcing a file (in Redis, or by the name of a folder).

Only one process at a time runs a run's folder: a launcher, or a replay. The kernel releases its lock when it exits.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.crashpoints import crashpoint
from streamrl.errors import ResourceError

LOCK = "up.lock"  # within a run's folder
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
# Raised where there is no such file. Any other OSError is the file system's, and tells nothing about the file.
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # returned by NFS and old kernels


def first_there(path: Path) -> Path:
    """Return the path itself, or its nearest ancestor that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def check_writable(folder: Path, *, what: str) -> None:
    """ResourceError if it is no writable folder and cannot become one; creates nothing."""
    there = first_there(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written to" if there.is_dir() else "is no folder"
        raise ResourceError(f"{what}: {there} {reason}; choose another place, or fix its permissions")


def fsync_file(path: Path) -> None:
    """Wait until the file's contents are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in this folder are on disk; before that, a rename is not durable."""
    fsync_file(folder)


def fsync_tree(folder: Path) -> None:
    """Wait until everything in the folder, at any depth, is on disk."""
    for path in (*folder.rglob("*"), folder):
        fsync_file(path)


def replace_folder(made: Path, folder: Path) -> None:
    """Give the finished folder `made`, which lies beside it, this name, and remove the one that had it. The name exists
    at all times; where the file system cannot exchange names it is missing for a moment, and `put_back` repairs a crash
    in that moment."""
    put_back(folder)
    old = _old(folder)
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


def put_back(folder: Path) -> None:
    """Restore the old folder if a `replace_folder` died while the name was missing. Call this before reading the
    folder."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)


def _old(folder: Path) -> Path:
    return folder.with_name(f".old-{folder.name}")


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically; False if not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    if (error := ctypes.get_errno()) in _NO_EXCHANGE:
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file by these contents; a reader sees the old or the new ones."""
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

    A hard link also fails if the name is taken, like O_EXCL, but the name never refers to partly written contents.
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set this path as the file name of an OSError inside: a full or failing disk reports none, and the name of a
    temporary file means nothing to users."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _write_aside(path: Path, data: bytes) -> Path:
    aside = path.parent / f".tmp-{path.name}-{uuid.uuid4().hex[:12]}"
    try:
        with naming(path), aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    crashpoint("file.aside")
    return aside


def take_lock(path: Path) -> int | None:
    """Lock a file or folder for as long as the returned descriptor is open; the kernel releases it when the process
    ends, however it ends. None if another process holds it."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def locked(path: Path, *, taken: str) -> Iterator[None]:
    """Hold the lock of this file or folder; if somebody else does, raise ResourceError with `taken`."""
    descriptor = take_lock(path)
    if descriptor is None:
        raise ResourceError(taken)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Lock the run's folder against other launchers. A lock file left by a dead one does not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK
    pid = lock.read_text() if lock.exists() else ""
    taken = (
        f"the run {name!r} is live: another process (pid {pid or 'unknown'}) runs {folder}; "
        f"end it (`streamrl stop {shlex.quote(str(folder))}`, `run.stop()`, or Ctrl-C where it was started), or choose "
        "another name"
    )
    with locked(lock, taken=taken):
        try:
            lock.write_text(str(os.getpid()))
        except OSError as error:
            error.filename = str(lock)  # a full disk reports no name, and launchers notice it here first
            raise
        yield
