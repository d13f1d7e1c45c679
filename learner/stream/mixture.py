"""Which rows a pass over the data asks for, and in which order, when datasets are mixed by weight.

A pass asks for `weight x rows` of each dataset, rounded, and for one at least:

    all its rows, as often as that many hold them  +  the rest, from a circle through the dataset
                                                      0 1 2 3 4 5 6 7 8 9   (a weight of 0.3: 0 1 2, then 3 4 5, ...)

So with a weight of 2 each row comes twice in each pass, and with 0.5 every other pass: no row comes more than once more
often than another of its dataset, however long the run. Shuffled, the circle is a permutation of the dataset, and each
pass has an order of its own; else rows come as in their files, the datasets spread evenly over the pass.

All of it follows from sizes, weights and the seed: nothing is kept, and any pass can be asked for at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_CACHED_PASSES = 2  # around the end of a pass, tickets of two passes are asked for by turns
_FIRST_CIRCLE = 1 << 63  # draws for circles are numbered from here on, those for passes from 0 on


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One dataset."""

    num_rows: int
    weight: float = 1.0

    @property
    def num_places(self) -> int:
        """In each pass."""
        return max(1, int(self.weight * self.num_rows + 0.5))


class Mixture:
    """Rows are numbered through all parts, in their order."""

    def __init__(self, parts: Sequence[Part], *, seed: int, shuffle: bool) -> None:
        self.parts = tuple(parts)
        self.num_places = sum(part.num_places for part in parts)  # of a pass
        self._seed = seed
        self._shuffle = shuffle
        self._passes: dict[int, npt.NDArray[np.int64]] = {}  # the latest few

    def locate(self, place: int) -> tuple[int, int]:
        """(passes before it, its row)"""
        data_epoch, position = divmod(place, self.num_places)
        known = self._passes.get(data_epoch)
        if known is None:
            known = self._passes[data_epoch] = self._rows_of(data_epoch)
            for old in sorted(self._passes)[:-_CACHED_PASSES]:
                del self._passes[old]
        return data_epoch, int(known[position])

    def _rows_of(self, data_epoch: int) -> npt.NDArray[np.int64]:  # [num_places]
        starts = np.cumsum([0, *(part.num_rows for part in self.parts)])
        rows = [start + self._rows_of_part(at, data_epoch) for at, start in enumerate(starts[:-1])]
        if self._shuffle:
            order = self._permutation(data_epoch, self.num_places)
        else:
            spread = [(np.arange(len(of_part)) + 0.5) / len(of_part) for of_part in rows]
            order = np.argsort(np.concatenate(spread), kind="stable")
        in_order: npt.NDArray[np.int64] = np.concatenate(rows)[order]
        return in_order

    def _rows_of_part(self, at: int, data_epoch: int) -> npt.NDArray[np.int64]:  # [num_places of the part]
        part = self.parts[at]
        num_times, num_rest = divmod(part.num_places, part.num_rows)
        rest = (np.arange(num_rest) + data_epoch * num_rest % part.num_rows) % part.num_rows
        if self._shuffle and num_rest:
            rest = self._permutation(_FIRST_CIRCLE + at, part.num_rows)[rest]
        return np.concatenate([np.tile(np.arange(part.num_rows), num_times), rest])

    def _permutation(self, draw: int, count: int) -> npt.NDArray[np.intp]:
        # Sorted raw draws: of a bit generator numpy promises the same stream in every release, of shuffles not.
        key = np.array([self._seed % (1 << 64), draw], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
