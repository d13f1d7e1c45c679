"""Files that are there whole or not at all, also after a power cut: write aside, fsync, rename, fsync the folder.

Blocks on the disk only. Whoever announces a file (in Redis, or by the name of a folder) calls one of these first.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from streamrl.crashpoints import crashpoint


def fsync_file(path: Path) -> None:
    """Wait until the file's contents are on the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(folder: Path) -> None:
    """Wait until the names in this folder are on the disk: a rename is not durable before that."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


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
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    crashpoint("file.aside")
    return aside


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
