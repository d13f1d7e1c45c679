"""Find the cheapest chain of manifests, by bytes, from the version that a worker has to the one it wants.

    anchor 6.48 ◄── 6.49 ◄── 6.50 ◄── 6.51 ◄── 6.52      have 6.51: 6.52
                           + anchor                      have 6.12, or none: the anchor of 6.50, 6.51, 6.52

A byte of a delta counts as DELTA_WEIGHT bytes of an anchor, because it takes that much longer to apply. Over a slow
network all bytes cost the same, so the chosen path may have up to DELTA_WEIGHT times the bytes of another, not more.

Blocks on nothing: the caller looks manifests up (`CatchUp.wants`) and waits in its own way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from streamrl.errors import WeightsError
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.versions import show

DELTA_WEIGHT = 4
_MAX_PATH = 4096  # versions; far above any sensible distance between anchors


class CatchUp:
    """A search from `have` (0: nothing) to the target: pass each manifest that `wants` names to `offer` until it
    is None.
    """

    def __init__(self, have: int, target: Manifest) -> None:
        self._have, self._target = have, target
        self._walked: list[Manifest] = []  # from the target back
        self._walked_cost = 0
        self._best: list[Manifest] | None = None
        self._best_cost = 0
        self.wants: int | None = None  # the version whose manifest is needed next
        if have < target.version:
            self.offer(target)

    def offer(self, manifest: Manifest | None) -> None:
        """Take the manifest that `wants` named; None: it no longer exists."""
        if manifest is None or (self._walked and manifest.version != self.wants):
            self.wants = None
            return
        anchor = manifest.as_anchor()
        if anchor is not None:
            self._consider([anchor, *self._walked[::-1]], self._walked_cost + anchor.num_bytes)
        self._walked.append(manifest)
        self._walked_cost += DELTA_WEIGHT * manifest.num_bytes
        if self._have and manifest.base == self._have:
            self._consider(self._walked[::-1], self._walked_cost)
        self.wants = manifest.base if self._may_be_shorter_by(manifest.base) else None
        if self.wants and len(self._walked) > _MAX_PATH:
            raise WeightsError(f"more than {_MAX_PATH} versions lead to {show(self._target.version)} without an anchor")

    def path(self) -> list[Manifest]:
        """Return the manifests in the order to apply them, with at most one anchor, which comes first.

        The path is empty when `have` is the target or newer. A gap in the chain raises WeightsError: try again with the
        newest announcement, since an anchor starts a chain without gaps.
        """
        if self._best is None and self._walked:
            missing = show(self._walked[-1].base)
            raise WeightsError(f"version {missing}, which leads to {show(self._target.version)}, no longer exists")
        return self._best or []

    def _consider(self, path: list[Manifest], cost: int) -> None:
        if self._best is None or cost <= self._best_cost:
            self._best, self._best_cost = path, cost

    def _may_be_shorter_by(self, base: int) -> bool:
        """Whether looking further back can still find a path, or a cheaper one."""
        if base in (0, self._have):
            return False
        # An older anchor is no smaller; only a chain of deltas from `have` can be cheaper.
        return self._best is None or (base > self._have > 0 and self._walked_cost < self._best_cost)


def catch_up(have: int, target: Manifest, manifests: Callable[[int], Manifest | None]) -> list[Manifest]:
    """Run `CatchUp` with a synchronous lookup."""
    way = CatchUp(have, target)
    while way.wants is not None:
        way.offer(manifests(way.wants))
    return way.path()


async def way_to(target: Manifest, look_up: Callable[[int], Awaitable[bytes | None]], *, have: int) -> list[Manifest]:
    """Run `CatchUp` with an asynchronous lookup of encoded manifests."""
    way = CatchUp(have, target)
    while way.wants is not None:
        encoded = await look_up(way.wants)
        way.offer(None if encoded is None else decode_manifest(encoded))
    return way.path()
