"""Which published versions are still needed, and the deletion of the others.

Workers pin no versions: the last two anchors and the deltas on them are kept; others are deleted after a grace period,
for workers that are still reading them. Blobs of failed attempts and earlier terms are deleted in the same way.

    publisher's thread   announced ─► what is needed now ───► next version ───► ...
                                               │
    thread of its own                          └─► sweep: list ─► older and unneeded for the grace period? ─► delete

A sweep runs beside publishing, one at a time, so that no version waits for it, however slow the store is. Meanwhile
the next version or an anchor may be on its way to the store: only blobs older than the newest announced version are
deleted. A failed deletion is retried at the next sweep.

A store with a budget has stricter rules: without room for the next version, unneeded blobs are deleted without a grace
period, oldest first, and then the older of the two anchors with its deltas. A worker that reads those finds a gap and
takes the newest anchor. `make_room` blocks on the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

import structlog

from streamrl.errors import StreamrlError
from streamrl.learner.process.background import Jobs
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.retention import collectable, retained
from streamrl.protocol.weights.stores import BlobStore
from streamrl.versions import number_of, term_of

_GRACE_S = 60.0
_EVERY_S = 30.0

log = structlog.get_logger(__name__)


class Sweeper:
    def __init__(
        self,
        *,
        store: BlobStore,
        run_uid: str,
        term: int,
        max_bytes: int = 0,  # of this run in the store; 0: no limit
        background: Jobs,  # for sweeps only
        clock: Callable[[], float],
    ) -> None:
        self._store, self._run_uid, self._term, self._clock = store, run_uid, term, clock
        self._max_bytes, self._background = max_bytes, background
        self._anchors: dict[int, bool] = {}  # announced version -> whether it has an anchor
        self._blobs: dict[int, frozenset[str]] = {}
        self._unneeded_since: dict[str, float] = {}  # only the sweep uses it
        self._next_sweep = clock()
        self._swept: Future[None] | None = None

    def kept_with(self, manifest: Manifest) -> frozenset[int]:
        """Return the versions to keep when this one is announced, itself among them."""
        return retained({**self._anchors, manifest.version: manifest.as_anchor() is not None})

    def announced(self, manifest: Manifest) -> None:
        keep = self.kept_with(manifest)
        self._anchors[manifest.version] = manifest.as_anchor() is not None
        self._blobs[manifest.version] = manifest.blob_names
        self._anchors = {version: anchor for version, anchor in self._anchors.items() if version in keep}
        self._blobs = {version: names for version, names in self._blobs.items() if version in keep}
        if self._clock() >= self._next_sweep and self._is_idle():
            self._next_sweep = self._clock() + _EVERY_S
            self._swept = self._background.submit(partial(self._sweep, self._needed(), manifest.version))

    def make_room(self, num_bytes: int) -> bool:
        """Make room for blobs of this size; False if the budget is too small even after deletions."""
        if not self._max_bytes:
            return True
        try:
            sizes = self._store.list(prefix=f"{self._run_uid}/")
            excess = sum(sizes.values()) + num_bytes - self._max_bytes
            excess -= self._delete(self._unneeded(sizes), sizes, excess)
            if excess > 0:
                self._forget_older_anchor()
                excess -= self._delete(self._unneeded(sizes), sizes, excess)
        except StreamrlError as error:
            log.warning("cannot make room for weights", error=str(error))
            return False
        if excess > 0:
            log.warning("weights.max_store_bytes has no room for a version", num_bytes=num_bytes, lacking=excess)
        return excess <= 0

    def _delete(self, names: list[str], sizes: Mapping[str, int], excess: int) -> int:
        """Delete blobs, oldest first, until the excess is gone; return the bytes freed."""
        freed = 0
        for name in sorted(names, key=_age):
            if freed >= excess:
                break
            self._store.delete(name)
            freed += sizes[name]
        return freed

    def _forget_older_anchor(self) -> None:
        newest = max((version for version, anchor in self._anchors.items() if anchor), default=0)
        self._anchors = {version: anchor for version, anchor in self._anchors.items() if version >= newest}
        self._blobs = {version: names for version, names in self._blobs.items() if version >= newest}

    def _unneeded(self, names: Iterable[str]) -> list[str]:
        return collectable(names, keep=self._needed(), run_uid=self._run_uid, term=self._term)

    def _needed(self) -> frozenset[str]:
        return frozenset[str]().union(*self._blobs.values())

    def _is_idle(self) -> bool:
        """Whether the last sweep is done; raises its defect, if it had one."""
        if self._swept is None:
            return True
        if not self._swept.done():
            return False
        self._swept.result()
        return True

    # In a thread of its own

    def _sweep(self, needed: frozenset[str], newest: int) -> None:
        """Delete what was not needed when version `newest` was announced, older blobs only."""
        try:
            sizes = self._store.list(prefix=f"{self._run_uid}/")
            unneeded = collectable(sizes, keep=needed, run_uid=self._run_uid, term=self._term)
            older = [name for name in unneeded if _age(name) < (term_of(newest), number_of(newest))]
            now = self._clock()
            self._unneeded_since = {name: self._unneeded_since.get(name, now) for name in older}
            self._store.delete(*(name for name, since in self._unneeded_since.items() if now - since >= _GRACE_S))
        except StreamrlError as error:
            log.warning("old weights not deleted", error=str(error))


def _age(name: str) -> tuple[int, int]:
    """Sort key, oldest first: the term, then the number within it."""
    _, term, *rest = name.split("/")
    number = rest[0].partition("-")[0] if rest else ""
    return int(term), int(number) if number.isdigit() else -1
