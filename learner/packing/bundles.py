"""Bundles: a prompt with responses to it, and the rows that they fill.

Bundles go, largest first, into the fullest row that still has room. If prompts may not be shared, a bundle has one
response.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from streamrl.learner.packing.cells import Cells, cells_of
from streamrl.learner.packing.micro_batches import Piece


@dataclass(frozen=True, slots=True)
class LaidSample:
    """A sample, cell by cell."""

    piece: Piece
    cells: tuple[Cells, ...]

    @property
    def hangs(self) -> bool:
        """Whether it is attached to a prompt that is laid before it."""
        return self.cells[0].on_prompt

    @property
    def size(self) -> int:
        """Number of cells, without those of a shared prompt."""
        return sum(len(cells.places) for cells in self.cells)


def lay_sample(piece: Piece, *, share: bool) -> LaidSample:
    found = cells_of(num_prompt=len(piece.prompt_ids), mask=piece.mask, branches=piece.branches, share=share)
    return LaidSample(piece, tuple(found))


@dataclass(slots=True)
class Bundle:
    """A prompt with responses to it, or one response with its own prompt."""

    laid: list[LaidSample]
    size: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.prompt_ids) + sum(each.size for each in self.laid)

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """The prompt that its responses share; empty if each has its own."""
        return self.laid[0].piece.prompt_ids[: None if self.laid[0].hangs else 0]


def bundles_of(laid: Iterable[LaidSample], length: int, *, share: bool) -> list[Bundle]:
    """Each group's samples in as few bundles as rows of this length allow, the largest bundle first."""
    found: list[Bundle] = []
    ordered = sorted(laid, key=lambda each: (each.piece.group, -each.piece.num_tokens, each.piece.sample))
    for _, group in groupby(ordered, key=lambda each: each.piece.group):
        of_group: list[Bundle] = []
        for each in group:
            hangs = share and each.hangs
            home = next((b for b in of_group if hangs and b.laid[0].hangs and b.size + each.size <= length), None)
            if home is None:
                of_group.append(Bundle([each]))
            else:
                home.laid.append(each)
                home.size += each.size
        found += of_group
    return sorted(found, key=lambda bundle: (-bundle.size, bundle.laid[0].piece.sample))


def fill_rows(bundles: Sequence[Bundle], length: int) -> list[list[Bundle]]:
    """Put each bundle into the fullest row of this length that still has room."""
    rows: list[list[Bundle]] = []
    room: list[tuple[int, int]] = []  # (free cells, row), sorted
    for bundle in bundles:
        at = bisect.bisect_left(room, (bundle.size, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(bundle)
        bisect.insort(room, (left - bundle.size, row))
    return rows
