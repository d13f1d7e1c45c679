"""Packs sequences of all lengths into few rows, isolated from each other, with each prompt only once.

All rows of a response are in one micro-batch, since a loss may need all of it. Longer rows pack better and repeat fewer
prompts, but attention costs the square of a row: the cheapest of a few lengths is taken. A micro-batch has as many rows
as `max_tokens` allows; a single sample may exceed it.

If prompts may not be shared, a bundle has one response, and `position_ids` alone mark where sequences begin: models
that build their own masks (sliding windows) read them there, and kernels that take lengths use `starts`. For models
that support neither each sequence has its own row: rows of similar length go together, so that there is little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from streamrl.learner.packing.bundles import Bundle, LaidSample, bundles_of, fill_rows, lay_sample
from streamrl.learner.packing.micro_batches import MicroBatch, Piece, Shape
from streamrl.learner.packing.rows import lay_out

_ROW_MULTIPLES = (1, 2, 4, 8)
_PASS = 1024  # fixed cost of a micro-batch (casting weights, launching kernels), in tokens


def pack(pieces: Sequence[Piece], *, max_tokens: int, shape: Shape) -> list[MicroBatch]:
    """Pack `pieces`, each of which has a token with a loss, into micro-batches."""
    if not pieces:
        return []
    laid = [lay_sample(piece, share=shape.shares(piece)) for piece in pieces]
    if shape.alone:
        return list(_alone(laid, min(max_tokens, shape.max_cells or max_tokens), shape))
    longest = shape.even(max(Bundle([each]).size for each in laid))
    if not shape.padded:
        rows = _flat(laid, longest, max(longest, max_tokens), shape)
        return [lay_out([row], shape.even(sum(bundle.size for bundle in row)), shape) for row in rows]
    lengths = [longest * n for n in _ROW_MULTIPLES if n == 1 or longest * n <= max_tokens]
    packed = [(fill_rows(bundles_of(laid, length, share=shape.share_prompts), length), length) for length in lengths]
    rows, length = min(packed, key=lambda candidate: shape.cost(len(candidate[0]), candidate[1]))
    rows_at_once = max(1, max_tokens // length)
    return [lay_out(rows[i : i + rows_at_once], length, shape) for i in range(0, len(rows), rows_at_once)]


def empty_micro_batch(shape: Shape) -> MicroBatch:
    """A pass with nothing to train, for a rank that has run out while others have not: collectives must match.

    Of two cells: for a dimension of one, layers would be compiled again.
    """
    return lay_out([[]], shape.even(2), shape)


def _flat(laid: Sequence[LaidSample], longest: int, most: int, shape: Shape) -> Sequence[Sequence[Bundle]]:
    """Rows of any length up to `most`. Small bundles fill rows better, large ones repeat fewer prompts."""
    sizes = [most // n for n in _ROW_MULTIPLES if most // n >= longest] if shape.share_prompts else [longest]
    packed = [fill_rows(bundles_of(laid, size, share=shape.share_prompts), most) for size in sizes]
    return min(packed, key=lambda rows: sum(_PASS + sum(bundle.size for bundle in row) for row in rows))


def _alone(laid: Sequence[LaidSample], max_cells: int, shape: Shape) -> Iterator[MicroBatch]:
    """Give each sequence a bundle and a row of its own, with the rows of one sample in one micro-batch."""
    each = [[Bundle([replace(one, cells=(cells,))]) for cells in one.cells] for one in laid]
    each.sort(key=lambda rows: (-max(row.size for row in rows), rows[0].laid[0].piece.sample))
    while each:
        length = max(row.size for row in each[0])
        batch = each.pop(0)
        while each and length * (len(batch) + len(each[0])) <= max_cells:
            batch += each.pop(0)
        yield lay_out([[bundle] for bundle in batch], length, shape)
