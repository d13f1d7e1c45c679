"""Which versions get an anchor, and which versions and blobs are kept: pure decisions; the publisher acts on them.

Nobody pins a version. A worker that finds a hole takes the newest anchor, so the last two anchors and what builds on
them are enough: the second for those who are in the middle of reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NUM_ANCHORS = 2


class AnchorPace:
    """An anchor when so many versions have passed since the last, or when their deltas sum up to a share of it.

    The share bounds what a late worker does: an anchor, and deltas of that share of its bytes. Applying a byte of a
    delta takes some ten times as long as copying a byte of an anchor, from a store as fast as memory. An anchor comes
    beside a delta, unless deltas are so large that it had better come alone.
    """

    def __init__(self, *, every: int, share: float) -> None:
        self._every, self._share = every, share
        self._anchor_bytes = self._delta_bytes = self._last_delta_bytes = self._num_deltas = 0

    @property
    def due(self) -> bool:
        """The next version should have one."""
        too_many = self._num_deltas + 1 >= self._every
        return too_many or self._delta_bytes > self._share * self._anchor_bytes

    @property
    def alone(self) -> bool:
        """The next version should be an anchor and nothing else: a delta beside it would save workers little."""
        return self.due and 2 * self._last_delta_bytes > self._anchor_bytes

    def announced(self, *, delta_bytes: int) -> None:
        self._num_deltas += 1
        self._delta_bytes += delta_bytes
        self._last_delta_bytes = delta_bytes

    def anchored(self, *, anchor_bytes: int) -> None:
        """The version announced last, or one that is an anchor by itself."""
        self._anchor_bytes, self._num_deltas, self._delta_bytes = anchor_bytes, 0, 0


def retained(anchors: Mapping[int, bool]) -> frozenset[int]:
    """Of the announced versions (version -> whether it has an anchor) those to keep: from the last anchor but one."""
    oldest = sorted(version for version, anchor in anchors.items() if anchor)[-_NUM_ANCHORS:][:1]
    return frozenset(version for version in anchors if version >= max(oldest, default=0))


def collectable(names: Iterable[str], *, keep: Iterable[str], run_uid: str, term: int) -> list[str]:
    """Of the names in a store, those of this run that no kept manifest uses. Never a newer term's: it is at work."""
    kept = set(keep)
    return [name for name in names if name not in kept and _is_ours(name, run_uid=run_uid, term=term)]


def _is_ours(name: str, *, run_uid: str, term: int) -> bool:
    uid, _, rest = name.partition("/")
    written_in = rest.partition("/")[0]
    return uid == run_uid and written_in.isascii() and written_in.isdigit() and int(written_in) <= term
