"""Which manifests lead a worker from the version it has to the one it wants.

    anchor 6.50 ◄── 6.51 ◄── 6.52 ◄── 6.53        have 6.51: 6.52, 6.53
                                                  have 6.12, or none: 6.50, 6.51, 6.52, 6.53

Blocks on nothing but the caller's look-up of manifests.
"""

from __future__ import annotations

from collections.abc import Callable

from streamrl.errors import WeightsError
from streamrl.versions import show
from streamrl.weights.manifest import Manifest

_MAX_PATH = 4096  # versions; far above any sensible distance between anchors


def catch_up(have: int, target: Manifest, manifests: Callable[[int], Manifest | None]) -> list[Manifest]:
    """Deltas from `have` (0: nothing), else the nearest anchor and the deltas after it, in the order to apply them.

    Empty when `have` is the target or newer. A hole in the chain is a WeightsError: try again with the newest
    announcement, since the next anchor starts a chain without holes.
    """
    if have >= target.version:
        return []
    path = [target]
    while (base := path[-1].base) not in (0, have):
        manifest = manifests(base)
        if manifest is None or manifest.version != base:
            raise WeightsError(f"version {show(base)}, which leads to {show(target.version)}, is not there any more")
        path.append(manifest)
        if len(path) > _MAX_PATH:
            raise WeightsError(f"more than {_MAX_PATH} versions lead to {show(target.version)} without an anchor")
    return path[::-1]
