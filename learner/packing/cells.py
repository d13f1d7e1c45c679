"""Lays a sample out cell by cell: where its tokens go in a row, and which cell predicts which token.

If the prompt may be shared, a sample with branches is a tree attached to it, and each of its tokens is computed once. A
row's tokens are laid in order; where another row branches off, that one is laid in between, entirely:

    prompt | a a | b b | c c                 row 0
                 └ d d d                     row 1, which branches off after the second a
    laid     a a   d d d   b b c c           each cell stores the end of the cells that see it:
             ─────────────────────┤ a, b, c: here; d: before the first b

A row that branches off before the prompt's end, or does not start with the prompt, is a separate sequence. If prompts
may not be shared, every row is. A row's last token predicts nothing, and has no cell unless a branch continues after
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamrl.protocol.wire.branches import Branch, rows_of

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    on_prompt: bool  # attached to a prompt that is laid once for all its responses
    places: Places  # [C] token of each cell, in prompt + response
    positions: Places  # [C] position id in the sequence
    ends: Places  # [C] one past the last cell that sees it, counted from the first of these
    trained: Places  # [t] indices of the response tokens with a loss here
    before: Places  # [t] cell that predicts each; -1: the prompt's last cell


def cells_of(
    *, num_prompt: int, mask: npt.NDArray[np.bool_], branches: Sequence[Branch], share: bool
) -> Iterator[Cells]:
    """Lay out one sample. `mask`: which response tokens have a loss."""
    if share and branches:
        return _Tree(num_prompt, mask, branches).cells()
    if share:
        return iter([_line(np.arange(num_prompt, num_prompt + len(mask)), num_prompt, 0, mask, on_prompt=True)])
    return _apart(num_prompt, mask, branches)


def _apart(num_prompt: int, mask: npt.NDArray[np.bool_], branches: Sequence[Branch]) -> Iterator[Cells]:
    """One sequence for each row that has tokens to train."""
    rows = rows_of(num_prompt, len(mask), branches)
    starts = [0, *(branch.start for branch in branches)]
    keeps = [num_prompt, *(branch.keep for branch in branches)]
    for row, start, keep in zip(rows, starts, keeps, strict=True):
        if mask[start : start + len(row) - keep].any() or not branches:
            yield _line(row, keep, start, mask, on_prompt=False)


def _line(row: Places, keep: int, start: int, mask: npt.NDArray[np.bool_], *, on_prompt: bool) -> Cells:
    """One sequence, or its part after the prompt; `keep` tokens precede those that begin at `start`."""
    num_cells = len(row) - 1
    own = np.flatnonzero(mask[start : start + len(row) - (0 if on_prompt else keep)])
    return Cells(
        on_prompt=on_prompt,
        places=row[:-1],
        positions=np.arange(num_cells) + (keep if on_prompt else 0),
        ends=np.full(num_cells, num_cells),
        trained=own + start,
        before=own - 1 + (0 if on_prompt else keep),
    )


class _Tree:
    def __init__(self, num_prompt: int, mask: npt.NDArray[np.bool_], branches: Sequence[Branch]) -> None:
        size = num_prompt + len(mask)
        rows = rows_of(num_prompt, len(mask), branches)
        self._mask, self._num_prompt = mask, num_prompt
        self._starts = [num_prompt + start for start in (0, *(branch.start for branch in branches))]
        self._own_ends = [*self._starts[1:], size]
        left = [num_prompt - 1, *(int(rows[b.row][b.keep - 1]) if b.keep else -1 for b in branches)]
        self._before = np.arange(-1, size - 1)  # place of the token before each one
        self._positions = np.arange(size)
        for start, end, place, keep in zip(
            self._starts, self._own_ends, left, (num_prompt, *(branch.keep for branch in branches)), strict=True
        ):
            self._before[start : start + 1] = place
            self._positions[start:end] = np.arange(keep, keep + end - start)
        self._leaving: dict[int, list[int]] = {}  # place -> rows that branch off after it
        for row, place in enumerate(left):
            self._leaving.setdefault(place, []).append(row)
        self._leaving = dict(sorted(self._leaving.items()))

    def cells(self) -> Iterator[Cells]:
        yield self._laid(self._leaving[self._num_prompt - 1], num_kept=0, on_prompt=True)
        for place in range(-1, self._num_prompt - 1):
            for row in self._leaving.get(place, ()):
                yield self._laid([row], num_kept=place + 1, on_prompt=False)

    def _laid(self, roots: Sequence[int], *, num_kept: int, on_prompt: bool) -> Cells:
        """These rows and all their branches, after `num_kept` tokens of the prompt."""
        stretches = [(0, num_kept, -1)] if num_kept else []  # (start, end, row) of places
        ends = {-1: 0}
        for row in roots:
            self._grow(row, stretches, ends)
        ends[-1] = sum(end - start for start, end, _ in stretches)
        places = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, end) for start, end, _ in stretches)])
        cell_of = np.full(len(self._before), -1)
        cell_of[places] = np.arange(len(places))
        learnt = [np.arange(self._starts[row], self._own_ends[row]) for row in sorted(ends) if row >= 0]
        own = np.concatenate([np.zeros(0, np.int64), *learnt])
        own = own[self._mask[own - self._num_prompt]]
        return Cells(
            on_prompt=on_prompt,
            places=places,
            positions=self._positions[places],
            ends=np.repeat([ends[row] for _, _, row in stretches], [end - start for start, end, _ in stretches]),
            trained=own - self._num_prompt,
            before=cell_of[self._before[own]],
        )

    def _grow(self, row: int, stretches: list[tuple[int, int, int]], ends: dict[int, int]) -> None:
        at, end = self._starts[row], self._own_ends[row]
        for place in [place for place in self._leaving if at <= place < end]:
            stretches.append((at, place + 1, row))
            at = place + 1
            for other in self._leaving[place]:
                self._grow(other, stretches, ends)
        if at < end - 1:
            stretches.append((at, end - 1, row))
        ends[row] = sum(end - start for start, end, _ in stretches)
