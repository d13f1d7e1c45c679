"""Which versions get an anchor, and which versions and blobs are kept: pure decisions, which the publisher executes.

Workers pin no versions. A worker that finds a gap takes the newest anchor, so the last two anchors and the deltas on
them are enough: the second for workers that are still reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NUM_ANCHORS = 2


class AnchorPace:
    """Makes an anchor due after `every` versions, or when the deltas since the last exceed `share` of its bytes.

    The share bounds the work of a worker that joins late: an anchor, and deltas of that share of its bytes. Applying a
    byte of a delta takes some ten times as long as copying a byte of an anchor from a store as fast as memory. An
    anchor is published beside a delta, unless deltas are so large that it should replace the delta.
    """

    def __init__(self, *, every: int, share: float) -> None:
        self._every, self._share = every, share
        self._anchor_bytes = self._delta_bytes = self._last_delta_bytes = self._num_deltas = 0

    @property
    def due(self) -> bool:
        """Whether the next version should have an anchor."""
        too_many = self._num_deltas + 1 >= self._every
        return too_many or self._delta_bytes > self._share * self._anchor_bytes

    @property
    def alone(self) -> bool:
        """Whether the next version should be an anchor only: a delta beside it would save workers little."""
        return self.due and 2 * self._last_delta_bytes > self._anchor_bytes

    def announced(self, *, delta_bytes: int) -> None:
        self._num_deltas += 1
        self._delta_bytes += delta_bytes
        self._last_delta_bytes = delta_bytes

    def anchored(self, *, anchor_bytes: int) -> None:
        """Note an anchor of the last announced version, or a version that is an anchor by itself."""
        self._anchor_bytes, self._num_deltas, self._delta_bytes = anchor_bytes, 0, 0


def retained(anchors: Mapping[int, bool]) -> frozenset[int]:
    """Return the versions to keep, from the last anchor but one on; `anchors` maps a version to whether it has one."""
    oldest = sorted(version for version, anchor in anchors.items() if anchor)[-_NUM_ANCHORS:][:1]
    return frozenset(version for version in anchors if version >= max(oldest, default=0))


def collectable(names: Iterable[str], *, keep: Iterable[str], run_uid: str, term: int) -> list[str]:
    """Return this run's blobs that no kept manifest uses, except those of a newer term: that learner is writing."""
    kept = set(keep)
    return [name for name in names if name not in kept and _is_ours(name, run_uid=run_uid, term=term)]


def _is_ours(name: str, *, run_uid: str, term: int) -> bool:
    uid, _, rest = name.partition("/")
    written_in = rest.partition("/")[0]
    return uid == run_uid and written_in.isascii() and written_in.isdigit() and int(written_in) <= term
