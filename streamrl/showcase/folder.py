"""A demonstration begins anew each time: its run's folder is cleared, if it is its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from streamrl.errors import ConfigError


def clear(folder: Path, *, what: str, keep: Iterable[str]) -> bool:
    """Remove what an earlier `what` has left; whether there was anything. ConfigError if it is somebody else's."""
    mark = f".{what}"  # in a folder that this demonstration has made, and so may clear
    left = [path for path in folder.iterdir() if path.name not in keep] if folder.is_dir() else []
    if left and not (folder / mark).exists():
        raise ConfigError(f"{folder} holds something else than a {what}; choose another name with name=...")
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).touch()
    return bool(left)
