"""Whether a model is on this machine: what is only on a hub is not downloaded before a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def is_downloaded(path: str) -> bool:
    """Whether the model is a local folder or in the hub's cache."""
    if Path(path).is_dir():
        return True
    from transformers.utils.hub import cached_file

    with suppress(OSError):
        return cached_file(path, "config.json", local_files_only=True) is not None
    return False
