"""Which versions and blobs are kept: pure decisions; the publisher deletes, after a grace.

Nobody pins a version. A worker that finds a hole takes the newest anchor, so the last two anchors and what builds on
them are enough: the second for those who are in the middle of reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NUM_ANCHORS = 2


def retained(bases: Mapping[int, int]) -> frozenset[int]:
    """Of the announced versions (version -> base, 0: anchor) those to keep: the last two anchors and all since."""
    anchors = sorted(version for version, base in bases.items() if base == 0)
    oldest = anchors[-_NUM_ANCHORS:][0] if anchors else 0
    return frozenset(version for version in bases if version >= oldest)


def collectable(names: Iterable[str], *, keep: Iterable[str], run_uid: str, epoch: int) -> list[str]:
    """Of the names in a store, those of this run that no kept manifest uses. Never a newer epoch's: it is at work."""
    kept = set(keep)
    return [name for name in names if name not in kept and _is_ours(name, run_uid=run_uid, epoch=epoch)]


def _is_ours(name: str, *, run_uid: str, epoch: int) -> bool:
    uid, _, rest = name.partition("/")
    written_in = rest.partition("/")[0]
    return uid == run_uid and written_in.isascii() and written_in.isdigit() and int(written_in) <= epoch
