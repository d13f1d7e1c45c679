"""Files and folders that are there whole or not at all, also after a power cut: write aside, fsync, rename, fsync the
folder. And locks on them.

Blocks on the disk only. Whoever announces a file (in Redis, or by the name of a folder) calls one of these first.

One process at a time runs a run's folder: a launcher, or a replay. The kernel frees the lock with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.crashpoints import crashpoint
from streamrl.errors import ResourceError

LOCK = "up.lock"  # within a run's folder
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
    where the file system cannot exchange names there is a moment when none has, and `put_back` mends what a crash in
    that moment has left."""
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
    """What had this name before a `replace_folder` that died with both names taken away has it again. Whoever reads the
    folder calls this first."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)


def _old(folder: Path) -> Path:
    return folder.with_name(f".old-{folder.name}")


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What the disk refuses inside is refused of this file or folder: a full disk names none, and a file that is
    written aside says nothing to anybody."""
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
        try:
            lock.write_text(str(os.getpid()))
        except OSError as error:
            error.filename = str(lock)  # a full disk names none, and this is where a launcher meets it first
            raise
        yield
