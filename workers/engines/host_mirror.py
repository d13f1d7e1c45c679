"""Where the weights lie on the host of a rank: its own mirror, whatever the path is called on the engine's first host.

    first host      the path that it says
    further ones    MIRROR_VARIABLE, and beside that file the version which is in it, as long as it is whole (`tag_of`)

So a rank that is to load a version which its host does not hold fails, with the host's name, and loads nothing else.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from streamrl.versions import show

MIRROR_VARIABLE = "STREAMRL_MIRROR"  # set for the ranks of a further host


def tag_of(mirror: Path) -> Path:
    return mirror.with_name("version")


def mirror_here(path: str, *, version: int) -> str:
    """0: whichever version is in it."""
    own = os.environ.get(MIRROR_VARIABLE)
    if own is None:
        return path
    try:
        held = int(tag_of(Path(own)).read_text())
    except FileNotFoundError:
        held = 0
    if not held or version not in (0, held):
        name = socket.gethostname()
        raise ValueError(
            f"host {name} holds {show(held) if held else 'no whole version'} of the weights, not {show(version)}"
            if version
            else f"host {name} holds no whole version of the weights"
        )
    return own
