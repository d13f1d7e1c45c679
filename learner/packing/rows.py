"""Lays bundles out in the rows of a micro-batch: which token is in which cell, what it sees, and what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from streamrl.learner.packing.bundles import Bundle
from streamrl.learner.packing.micro_batches import NO_ROUTE, NO_TOKEN, MicroBatch, Piece, Shape
from streamrl.learner.packing.prefixes import prefixes_of
from streamrl.protocol.wire.routes import is_missing


def lay_out(rows: Sequence[Sequence[Bundle]], length: int, shape: Shape) -> MicroBatch:
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


def _empty_routes(rows: Sequence[Sequence[Bundle]], length: int) -> npt.NDArray[np.int16] | None:
    """Routes of all cells, preset to NO_TOKEN; None if samples carry no routes."""
    pieces = (one.piece for row in rows for bundle in row for one in bundle.laid)
    shape_source = next((piece.routes for piece in pieces if piece.routes is not None), None)
    return None if shape_source is None else np.full((len(rows), length, *shape_source.shape[1:]), NO_TOKEN, np.int16)


def _lay_bundle(
    bundle: Bundle, row: npt.NDArray[np.int64], start: int, routes: npt.NDArray[np.int16] | None
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
