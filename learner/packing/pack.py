"""Packs sequences of all lengths into few rows, isolated from each other, with each prompt only once.

    samples ──► bundles, a prompt with responses to it ──► rows ──► micro-batches, cell by cell

Bundles go, largest first, into the fullest row that still has room. All rows of a response are in one micro-batch,
since a loss may need all of it. Longer rows pack better and repeat fewer prompts, but attention costs the square of a
row: the cheapest of a few lengths is taken. A micro-batch has as many rows as `max_tokens` allows; a single sample may
exceed it.

If prompts may not be shared, a bundle has one response, and `position_ids` alone mark where sequences begin: models
that build their own masks (sliding windows) read them there, and kernels that take lengths use `starts`. For models
that support neither each sequence has its own row: rows of similar length go together, so that there is little padding.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from streamrl.learner.packing.cells import Cells, cells_of
from streamrl.learner.packing.micro_batches import NO_ROUTE, NO_TOKEN, MicroBatch, Piece, Shape
from streamrl.learner.packing.prefixes import prefixes_of
from streamrl.protocol.wire.routes import is_missing

_ROW_MULTIPLES = (1, 2, 4, 8)
_PASS = 1024  # fixed cost of a micro-batch (casting weights, launching kernels), in tokens


@dataclass(frozen=True, slots=True)
class _LaidSample:
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


@dataclass(slots=True)
class _Bundle:
    """A prompt with responses to it, or one response with its own prompt."""

    laid: list[_LaidSample]
    size: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.prompt_ids) + sum(each.size for each in self.laid)

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """The prompt that its responses share; empty if each has its own."""
        return self.laid[0].piece.prompt_ids[: None if self.laid[0].hangs else 0]


def pack(pieces: Sequence[Piece], *, max_tokens: int, shape: Shape) -> list[MicroBatch]:
    """Pack `pieces`, each of which has a token with a loss, into micro-batches."""
    if not pieces:
        return []
    laid = [_lay_sample(piece, share=shape.shares(piece)) for piece in pieces]
    if shape.alone:
        return list(_alone(laid, min(max_tokens, shape.max_cells or max_tokens), shape))
    longest = shape.even(max(_Bundle([each]).size for each in laid))
    if not shape.padded:
        rows = _flat(laid, longest, max(longest, max_tokens), shape)
        return [_lay_out([row], shape.even(sum(bundle.size for bundle in row)), shape) for row in rows]
    lengths = [longest * n for n in _ROW_MULTIPLES if n == 1 or longest * n <= max_tokens]
    packed = [(_fill_rows(_bundles_of(laid, length, share=shape.share_prompts), length), length) for length in lengths]
    rows, length = min(packed, key=lambda candidate: shape.cost(len(candidate[0]), candidate[1]))
    rows_at_once = max(1, max_tokens // length)
    return [_lay_out(rows[i : i + rows_at_once], length, shape) for i in range(0, len(rows), rows_at_once)]


def empty_micro_batch(shape: Shape) -> MicroBatch:
    """A pass with nothing to train, for a rank that has run out while others have not: collectives must match.

    Of two cells: for a dimension of one, layers would be compiled again.
    """
    return _lay_out([[]], shape.even(2), shape)


def _flat(laid: Sequence[_LaidSample], longest: int, most: int, shape: Shape) -> Sequence[Sequence[_Bundle]]:
    """Rows of any length up to `most`. Small bundles fill rows better, large ones repeat fewer prompts."""
    sizes = [most // n for n in _ROW_MULTIPLES if most // n >= longest] if shape.share_prompts else [longest]
    packed = [_fill_rows(_bundles_of(laid, size, share=shape.share_prompts), most) for size in sizes]
    return min(packed, key=lambda rows: sum(_PASS + sum(bundle.size for bundle in row) for row in rows))


def _alone(laid: Sequence[_LaidSample], max_cells: int, shape: Shape) -> Iterator[MicroBatch]:
    """Give each sequence a bundle and a row of its own, with the rows of one sample in one micro-batch."""
    each = [[_Bundle([replace(one, cells=(cells,))]) for cells in one.cells] for one in laid]
    each.sort(key=lambda rows: (-max(row.size for row in rows), rows[0].laid[0].piece.sample))
    while each:
        length = max(row.size for row in each[0])
        batch = each.pop(0)
        while each and length * (len(batch) + len(each[0])) <= max_cells:
            batch += each.pop(0)
        yield _lay_out([[bundle] for bundle in batch], length, shape)


# Bundles, and the rows that they fill


def _lay_sample(piece: Piece, *, share: bool) -> _LaidSample:
    found = cells_of(num_prompt=len(piece.prompt_ids), mask=piece.mask, branches=piece.branches, share=share)
    return _LaidSample(piece, tuple(found))


def _bundles_of(laid: Iterable[_LaidSample], length: int, *, share: bool) -> list[_Bundle]:
    """Each group's samples in as few bundles as rows of this length allow, the largest bundle first."""
    found: list[_Bundle] = []
    ordered = sorted(laid, key=lambda each: (each.piece.group, -each.piece.num_tokens, each.piece.sample))
    for _, group in groupby(ordered, key=lambda each: each.piece.group):
        of_group: list[_Bundle] = []
        for each in group:
            hangs = share and each.hangs
            home = next((b for b in of_group if hangs and b.laid[0].hangs and b.size + each.size <= length), None)
            if home is None:
                of_group.append(_Bundle([each]))
            else:
                home.laid.append(each)
                home.size += each.size
        found += of_group
    return sorted(found, key=lambda bundle: (-bundle.size, bundle.laid[0].piece.sample))


def _fill_rows(bundles: Sequence[_Bundle], length: int) -> list[list[_Bundle]]:
    """Put each bundle into the fullest row of this length that still has room."""
    rows: list[list[_Bundle]] = []
    room: list[tuple[int, int]] = []  # (free cells, row), sorted
    for bundle in bundles:
        at = bisect.bisect_left(room, (bundle.size, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(bundle)
        bisect.insort(room, (left - bundle.size, row))
    return rows


# Rows as a micro-batch


def _lay_out(rows: Sequence[Sequence[_Bundle]], length: int, shape: Shape) -> MicroBatch:
    """The rows as a micro-batch: which token is in which cell, what it sees, and what it predicts."""
    cells = np.zeros((3, len(rows), length), dtype=np.int64)  # input ids, position ids, until
    cells[2] = length
    is_token = np.zeros((len(rows), length), dtype=np.bool_)
    routes = _empty_routes(rows, length)
    trained: list[npt.NDArray[np.int64]] = []  # [5, t] index, target, position, place in the turn, sample
    behaviour_logprobs: list[npt.NDArray[np.float32]] = [np.zeros(0, dtype=np.float32)]
    for r, row in enumerate(rows):
        start = 0
        for bundle in row:
            for piece, own, before in _lay_bundle(bundle, cells[:, r], start, None if routes is None else routes[r]):
                turn_starts = np.asarray(piece.turns)
                in_turn = own - turn_starts[np.searchsorted(turn_starts, own, side="right") - 1]
                sample = np.full_like(own, piece.sample)
                trained.append(np.stack([r * length + before, piece.token_ids[own], own, in_turn, sample]))
                behaviour_logprobs.append(piece.behaviour_logprobs[own])
            start += bundle.size
        is_token[r, :start] = True
    flat = np.concatenate(trained, axis=1) if trained else np.zeros((5, 0), dtype=np.int64)
    input_ids, position_ids, until = torch.from_numpy(cells)
    index_of, targets, positions, in_turn_of, samples = torch.from_numpy(flat)
    is_flat = shape.share_prompts and not shape.padded
    starts = _starts(cells, split=is_flat)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        is_token=torch.from_numpy(is_token),
        until=until,
        index=index_of,
        targets=targets,
        position=positions,
        in_turn=in_turn_of,
        behaviour_logprobs=torch.from_numpy(np.concatenate(behaviour_logprobs)),
        sample=samples,
        starts=torch.from_numpy(starts.astype(np.int32)),
        longest=int(np.diff(starts).max()),
        prefixes=prefixes_of(starts, cells[1].ravel()) if is_flat else None,
        own_tokens=None if shape.parts == 1 else torch.from_numpy(_predicted_in(flat[0], length, shape)),
        routes=None if routes is None else torch.from_numpy(routes),
    )


def _starts(cells: npt.NDArray[np.int64], *, split: bool) -> npt.NDArray[np.int64]:
    """Where sequences begin, rows concatenated; then the end. `split`: a prompt and each of several responses to it are
    sequences of their own. Their cells end at different places; a single response goes on with its prompt."""
    _, positions, until = cells.reshape(3, -1)
    begins = positions == 0
    if split:
        begins[1:] |= until[1:] != until[:-1]
    return np.append(np.flatnonzero(begins), len(positions))


def _predicted_in(index: npt.NDArray[np.int64], length: int, shape: Shape) -> npt.NDArray[np.int64]:
    """Indices of the tokens predicted by cells of this rank's part."""
    size = length // shape.parts
    assert size * shape.parts == length, "rows are padded to parts of equal length"
    return np.flatnonzero(index % length // size == shape.part)


def _empty_routes(rows: Sequence[Sequence[_Bundle]], length: int) -> npt.NDArray[np.int16] | None:
    """Routes of all cells, preset to NO_TOKEN; None if samples carry no routes."""
    pieces = (one.piece for row in rows for bundle in row for one in bundle.laid)
    shape_source = next((piece.routes for piece in pieces if piece.routes is not None), None)
    return None if shape_source is None else np.full((len(rows), length, *shape_source.shape[1:]), NO_TOKEN, np.int16)


def _lay_bundle(
    bundle: _Bundle, row: npt.NDArray[np.int64], start: int, routes: npt.NDArray[np.int16] | None
) -> Iterator[tuple[Piece, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Write a bundle into the row's columns and routes: the prompt, its responses, then separate sequences.

    Yields (piece, trained tokens, cells that predict them).
    """
    prompt_ids = bundle.prompt_ids
    row[:2, start : start + len(prompt_ids)] = prompt_ids, np.arange(len(prompt_ids))
    ordered = sorted(
        ((each.piece, cells) for each in bundle.laid for cells in each.cells), key=lambda pair: not pair[1].on_prompt
    )
    first = start + len(prompt_ids)
    if routes is not None:
        _write_routes(bundle.laid[0].piece, np.arange(len(prompt_ids)), routes[start:first])
    hanging = sum(len(cells.places) for _, cells in ordered if cells.on_prompt)
    row[2, start:first] = first + hanging
    for piece, cells in ordered:
        end = first + len(cells.places)
        whole = np.concatenate([piece.prompt_ids, piece.token_ids])
        row[:, first:end] = whole[cells.places], cells.positions, first + cells.ends
        if routes is not None:
            _write_routes(piece, cells.places, routes[first:end])
        # The prompt's last cell predicts the first token of every response.
        yield piece, cells.trained, np.where(cells.before < 0, start + len(prompt_ids) - 1, first + cells.before)
        first = end


def _write_routes(piece: Piece, places: npt.NDArray[np.int64], cells: npt.NDArray[np.int16]) -> None:
    cells[:] = NO_ROUTE
    if piece.routes is not None:
        routes = piece.routes[places]
        has_route = ~is_missing(routes)
        cells[has_route] = routes[has_route]
