"""Finds the weights on a rank's own host, which may keep its mirror at another path than the engine's first host.

    first host      the path in the load request
    further hosts   MIRROR_VARIABLE; a file beside it holds the version it contains, while it is complete (`tag_of`)

A rank whose host does not hold the requested version fails, naming the host, and loads nothing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from streamrl.versions import show

MIRROR_VARIABLE = "STREAMRL_MIRROR"  # set for the ranks on a further host


def tag_of(mirror: Path) -> Path:
    return mirror.with_name("version")


def mirror_here(path: str, *, version: int) -> str:
    """Return the path of this host's mirror, after checking its version; 0: any version."""
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
            f"host {name} holds {show(held) if held else 'no complete version'} of the weights, not {show(version)}"
            if version
            else f"host {name} holds no complete version of the weights"
        )
    return own
