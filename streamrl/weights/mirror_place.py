"""Where a worker's mirror lies: the worker makes the folder, and who has killed the worker removes it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

PREFIX = "streamrl-mirror-"
_SHARED_MEMORY = Path("/dev/shm")


def mirror_root() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def mirror_place(run_uid: str, worker: str, *, root: Path | None = None) -> Path:
    return (root or mirror_root()) / (PREFIX + re.sub(r"[^A-Za-z0-9._-]", "_", f"{run_uid}-{worker}"))
