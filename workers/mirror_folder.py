"""Where a worker's mirror lies: a folder in shared memory that is this worker's alone while it lives."""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.errors import ResourceError

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def mirror_folder(run_uid: str, worker: str) -> Iterator[Path]:
    """A worker that comes again under its name finds, and replaces, what the one before it left when it was killed."""
    root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"streamrl-{run_uid}-{worker}")
    folder = root / name
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"another worker of this run is alive on this machine under the name {worker!r}: give each worker a "
                "--worker-id of its own"
            ) from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
