"""Which published versions are still needed, and the deletion of what is not.

Nobody pins a version: the last two anchors and what builds on them are kept, the rest goes after a grace, for workers
that are in the middle of reading it. What failed attempts and earlier epochs left in the store goes the same way.
Blocks on the store; a deletion that fails is tried again at the next sweep.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from streamrl.errors import StreamrlError
from streamrl.weights.manifest import Manifest
from streamrl.weights.retention import collectable, retained
from streamrl.weights.stores import BlobStore

_GRACE_S = 60.0
_EVERY_S = 30.0

log = structlog.get_logger(__name__)


class Sweeper:
    def __init__(self, *, store: BlobStore, run_uid: str, epoch: int, clock: Callable[[], float]) -> None:
        self._store, self._run_uid, self._epoch, self._clock = store, run_uid, epoch, clock
        self._bases: dict[int, int] = {}  # by announced version; 0: an anchor
        self._blobs: dict[int, frozenset[str]] = {}
        self._unneeded_since: dict[str, float] = {}
        self._next_sweep = clock()

    def kept_with(self, manifest: Manifest) -> frozenset[int]:
        """The versions that stay when this one is announced, itself among them."""
        return retained({**self._bases, manifest.version: manifest.base})

    def announced(self, manifest: Manifest) -> None:
        keep = self.kept_with(manifest)
        self._bases[manifest.version] = manifest.base
        self._blobs[manifest.version] = frozenset(shard.blob_name for shard in manifest.shards)
        self._bases = {version: base for version, base in self._bases.items() if version in keep}
        self._blobs = {version: names for version, names in self._blobs.items() if version in keep}
        if self._clock() >= self._next_sweep:
            self._next_sweep = self._clock() + _EVERY_S
            self._sweep()

    def _sweep(self) -> None:
        try:
            names = self._store.list(prefix=f"{self._run_uid}/")
            needed = frozenset().union(*self._blobs.values())
            unneeded = collectable(names, keep=needed, run_uid=self._run_uid, epoch=self._epoch)
            now = self._clock()
            self._unneeded_since = {name: self._unneeded_since.get(name, now) for name in unneeded}
            for name, since in self._unneeded_since.items():
                if now - since >= _GRACE_S:
                    self._store.delete(name)
        except StreamrlError as error:
            log.warning("old weights not deleted", error=str(error))
