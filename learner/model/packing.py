"""Many sequences of all lengths in few rows, without one changing another, and each prompt only once.

    row 0 | p p p r r r r s s s | q q r r |     p, q prompts; r, s responses to the prompt before them
    row 1 | q q s s s s t t t | . . . . . |     position ids: s begins where r began, right after its prompt

A *bundle* is a prompt with responses to it. A token sees the prompt of its bundle and its own response so far. Bundles
go, largest first, into the fullest row that still holds them. Longer rows fill better and repeat fewer prompts, but
attention costs the square of a row: of a few lengths the cheapest is taken. A micro-batch is as many rows as
`max_tokens` allows.

The last token of a response predicts nothing and is left out; only tokens with a loss are asked of the head. Where
prompts may not be shared, a bundle has one response, and `position_ids` alone tell where sequences begin: models that
take no mask of ours (sliding windows) find them there, and kernels that take lengths in `starts`. For models that find
them nowhere each sequence has a row to itself: rows of like length lie together, so that little is padded.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

_ROW_MULTIPLES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One sample as it goes into a row."""

    sample: int  # its index in the rank's batch
    group: int  # samples of one group have the same prompt
    prompt_ids: npt.NDArray[np.int32]  # [P], at least one
    token_ids: npt.NDArray[np.int32]  # [T] the response, at least one
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T] has a loss
    turns: tuple[int, ...] = (0,)  # where the model began to speak: of several, each is a response of its own

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    input_ids: torch.Tensor  # [rows, length]
    position_ids: torch.Tensor  # [rows, length] from 0 in each sequence; 0 where the row is empty
    bundle: torch.Tensor  # [rows, length] which of its row's bundles, from 1; 0 where the row is empty
    branch: torch.Tensor  # [rows, length] which of its bundle's responses, from 1; 0 for the prompt
    index: torch.Tensor  # [T] of the position, rows laid end to end, whose output predicts the token
    targets: torch.Tensor  # [T] the tokens with a loss
    position: torch.Tensor  # [T] of the token in its response
    in_turn: torch.Tensor  # [T] of the token in its turn
    behaviour_logprobs: torch.Tensor  # [T]
    sample: torch.Tensor  # [T] whose token it is
    starts: torch.Tensor  # [sequences + 1] int32: where sequences begin, rows laid end to end; then the end of the last
    longest: int  # of these sequences; both are of use only where prompts are not shared

    def attention_mask(self, window: int | None = None) -> torch.Tensor:
        """[rows, 1, length, length] True: the later one sees the earlier, which lies within the window."""
        causal = torch.ones(2 * self.bundle.shape[1:], dtype=torch.bool, device=self.bundle.device).tril()
        together = self.bundle[:, :, None] == self.bundle[:, None, :]
        in_sight = (self.branch[:, None, :] == 0) | (self.branch[:, :, None] == self.branch[:, None, :])
        seen = causal & together & in_sight
        if window is not None:
            seen &= self.position_ids[:, :, None] - self.position_ids[:, None, :] < window
        return seen[:, None]

    def to(self, device: torch.device) -> MicroBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = value.to(device, non_blocking=True)
        return MicroBatch(**values)


def additive(mask: torch.Tensor) -> torch.Tensor:
    """The mask for attention that adds it to its scores."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the model makes of rows."""

    hidden_size: int
    share_prompts: bool
    padded: bool = True  # rows must be equally long; else one row of any length
    alone: bool = False  # a row for each sequence
    max_cells: int | None = None  # of a micro-batch, where `max_tokens` may be more than memory bears

    def cost(self, num_rows: int, length: int) -> int:
        """Relative: a layer spends about 24 hidden^2 on a token's projections, 4 hidden length on its attention."""
        return num_rows * length * (6 * self.hidden_size + length)


def pack(pieces: Sequence[Piece], *, max_tokens: int, shape: Shape) -> list[MicroBatch]:
    if not pieces:
        return []
    longest = max(piece.num_tokens for piece in pieces)
    if shape.alone:
        return list(_alone(pieces, min(max_tokens, shape.max_cells or max_tokens)))
    if not shape.padded:
        full = _fill(_bundles(pieces, longest, share=shape.share_prompts), max(longest, max_tokens))
        return [_lay_out([row], sum(bundle.size for bundle in row)) for row in full]
    lengths = [longest * n for n in _ROW_MULTIPLES if n == 1 or longest * n <= max_tokens]
    packed = [(_fill(_bundles(pieces, length, share=shape.share_prompts), length), length) for length in lengths]
    rows, length = min(packed, key=lambda candidate: shape.cost(len(candidate[0]), candidate[1]))
    rows_at_once = max(1, max_tokens // length)
    return [_lay_out(rows[i : i + rows_at_once], length) for i in range(0, len(rows), rows_at_once)]


def _alone(pieces: Sequence[Piece], max_cells: int) -> Iterator[MicroBatch]:
    rows = _bundles(pieces, 0, share=False)
    while rows:
        length = rows[0].size
        at_once = max(1, max_cells // length)
        yield _lay_out([[bundle] for bundle in rows[:at_once]], length)
        rows = rows[at_once:]


def empty_micro_batch() -> MicroBatch:
    """A pass with nothing to learn, for a rank that has run out while others have not: collectives must match."""
    return _lay_out([[]], 1)


@dataclass(slots=True)
class _Bundle:
    pieces: list[Piece]
    size: int


def _bundles(pieces: Iterable[Piece], length: int, *, share: bool) -> list[_Bundle]:
    """Each group's samples in as few bundles as rows of this length allow; the largest bundle first."""
    found: list[_Bundle] = []
    ordered = sorted(pieces, key=lambda piece: (piece.group, -piece.num_tokens, piece.sample))
    for _, group in groupby(ordered, key=lambda piece: piece.group):
        of_group: list[_Bundle] = []
        for piece in group:
            added = len(piece.token_ids) - 1
            home = next((b for b in of_group if share and b.size + added <= length), None)
            if home is None:
                of_group.append(_Bundle([piece], piece.num_tokens))
            else:
                home.pieces.append(piece)
                home.size += added
        found += of_group
    return sorted(found, key=lambda bundle: (-bundle.size, bundle.pieces[0].sample))


def _fill(bundles: Sequence[_Bundle], length: int) -> list[list[_Bundle]]:
    rows: list[list[_Bundle]] = []
    room: list[tuple[int, int]] = []  # (what is left, row), sorted
    for bundle in bundles:
        at = bisect.bisect_left(room, (bundle.size, 0))
        left, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(bundle)
        bisect.insort(room, (left - bundle.size, row))
    return rows


def _lay_out(rows: Sequence[Sequence[_Bundle]], length: int) -> MicroBatch:
    cells = np.zeros((4, len(rows), length), dtype=np.int64)  # input ids, position ids, bundle, branch
    trained: list[npt.NDArray[np.int64]] = []  # [5, t] index, target, position, place in the turn, sample
    behaviour_logprobs: list[npt.NDArray[np.float32]] = [np.zeros(0, dtype=np.float32)]
    for r, row in enumerate(rows):
        start = 0
        for b, bundle in enumerate(row, start=1):
            prompt_ids = bundle.pieces[0].prompt_ids
            first = start + len(prompt_ids)  # of the next response's cells
            cells[:, r, start:first] = _cells(prompt_ids, 0, b, 0)
            for i, piece in enumerate(bundle.pieces, start=1):
                end = first + len(piece.token_ids) - 1
                cells[:, r, first:end] = _cells(piece.token_ids[:-1], len(prompt_ids), b, i)
                position = np.flatnonzero(piece.mask)
                # The prompt's last cell predicts the first token of every response.
                index = r * length + np.where(position == 0, start + len(prompt_ids), first + position) - 1
                begun = np.asarray(piece.turns)
                in_turn = position - begun[np.searchsorted(begun, position, side="right") - 1]
                sample = np.full_like(index, piece.sample)
                trained.append(np.stack([index, piece.token_ids[position], position, in_turn, sample]))
                behaviour_logprobs.append(piece.behaviour_logprobs[position])
                first = end
            start = first
    flat = np.concatenate(trained, axis=1) if trained else np.zeros((5, 0), dtype=np.int64)
    input_ids, position_ids, bundle_ids, branch_ids = torch.from_numpy(cells)
    index_of, targets, positions, in_turn_of, samples = torch.from_numpy(flat)
    starts = np.append(np.flatnonzero(cells[1] == 0), cells[1].size).astype(np.int32)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        bundle=bundle_ids,
        branch=branch_ids,
        index=index_of,
        targets=targets,
        position=positions,
        in_turn=in_turn_of,
        behaviour_logprobs=torch.from_numpy(np.concatenate(behaviour_logprobs)),
        sample=samples,
        starts=torch.from_numpy(starts),
        longest=int(np.diff(starts).max()),
    )


def _cells(tokens: npt.NDArray[np.int32], first_position: int, bundle: int, branch: int) -> npt.NDArray[np.int64]:
    """[4, tokens] the columns of `cells` for a run of tokens."""
    positions = np.arange(first_position, first_position + len(tokens))
    return np.stack([tokens, positions, np.full_like(positions, bundle), np.full_like(positions, branch)])
