"""The order of rows: which row each place of each pass over the data stands for.

Datasets are mixed by weight. A pass has `weight x rows` places for each dataset, rounded, and at least one:

    all its rows, as often as they fit entirely  +  the rest, from a circle through the dataset
                                                    0 1 2 3 4 5 6 7 8 9   (a weight of 0.3: 0 1 2, then 3 4 5, ...)

So with a weight of 2 each row comes twice in each pass, and with 0.5 every other pass: no row comes more than once more
often than another of its dataset, however long the run. If shuffled, the circle is a permutation of the dataset and
each pass has its own order; else rows keep their files' order, with the datasets spread evenly over the pass.

All of it follows from sizes, weights and the seed: nothing is stored, and any pass can be computed at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_CACHED_PASSES = 2  # around the end of a pass, tickets of two passes alternate
_FIRST_CIRCLE = 1 << 63  # random streams for circles count from here, those for passes from 0
_FIRST_UNIFORMS = 1 << 62  # streams for admission, one per pass, count from here


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDataset:
    """Size and weight of one dataset."""

    num_rows: int
    weight: float = 1.0

    @property
    def num_places(self) -> int:
        """Places per pass."""
        return max(1, int(self.weight * self.num_rows + 0.5))


class Mixture:
    """The order of rows in each pass; rows are numbered through all parts in order."""

    def __init__(self, parts: Sequence[MixedDataset], *, seed: int, shuffle: bool) -> None:
        self.parts = tuple(parts)
        self.num_places = sum(part.num_places for part in parts)  # per pass
        self._seed = seed
        self._shuffle = shuffle
        self.rows_of_pass = lru_cache(_CACHED_PASSES)(self._rows_of)
        self.uniforms_of_pass = lru_cache(_CACHED_PASSES)(self._uniforms_of)

    def locate(self, place: int) -> tuple[int, int]:
        """(passes before it, its row)"""
        data_epoch, position = divmod(place, self.num_places)
        return data_epoch, int(self.rows_of_pass(data_epoch)[position])

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

    def _uniforms_of(self, data_epoch: int) -> npt.NDArray[np.float64]:  # [num_places]
        draws: npt.NDArray[np.uint64] = self._draws(_FIRST_UNIFORMS + data_epoch, self.num_places)
        return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _permutation(self, draw: int, count: int) -> npt.NDArray[np.intp]:
        return np.argsort(self._draws(draw, count), kind="stable")

    def _draws(self, draw: int, count: int) -> npt.NDArray[np.uint64]:
        # Raw draws: numpy guarantees a bit generator's stream across releases, but not that of shuffles.
        key = np.array([self._seed % (1 << 64), draw], dtype=np.uint64)
        drawn: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
        return drawn
