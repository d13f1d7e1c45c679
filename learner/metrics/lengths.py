"""Groups that ended, by the length of their longest response: does dropping hit the long ones?

It does, as a rule: what takes long is old when it comes, and one slow sample makes the group. So every drop of a group
whose lengths are known is counted by them, beside all that ended, and the rate is shown for each length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from streamrl.wire.group import GroupHeader

_PARTS = (8, 4, 2, 1)  # buckets end at these parts of the longest response there may be


class Lengths:
    def __init__(self, max_tokens: int, known: Mapping[int, tuple[int, int]]) -> None:
        self._bounds = sorted({-(-max_tokens // part) for part in _PARTS})
        self._ended = Counter({bound: ended for bound, (ended, _) in known.items()})
        self._dropped = Counter({bound: dropped for bound, (_, dropped) in known.items()})

    def count(self, header: GroupHeader, *, dropped: bool) -> None:
        at = bisect_left(self._bounds, max(header.sample_lengths, default=0))
        bound = self._bounds[min(at, len(self._bounds) - 1)]
        self._ended[bound] += 1
        self._dropped[bound] += dropped

    def known(self) -> dict[int, tuple[int, int]]:
        """By the upper bound of the length in tokens: groups that ended, and of them those dropped."""
        return {bound: (ended, self._dropped[bound]) for bound, ended in sorted(self._ended.items())}

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for bound, (ended, dropped) in self.known().items():
            found[f"stream/dropped_by_length/{bound}"] = float(dropped)
            found[f"stream/drop_rate_by_length/{bound}"] = dropped / ended
        return found
