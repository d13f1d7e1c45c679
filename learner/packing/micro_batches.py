"""What a micro-batch is: the samples that go into it, its rows as tensors, and the form of rows that a model accepts.

    row 0 | p p p r r r r s s s | q q r r |     p, q prompts; r, s responses to the prompt before them
    row 1 | q q s s s s t t t | . . . . . |     position ids: s begins where r began, right after its prompt

Sequences are isolated from each other. A token sees the prompt of its bundle and its own response so far; in a response
with branches, the row that it is in (`learner.packing.cells`). The last token of a response predicts nothing and is
left out; the head computes only tokens with a loss. Which samples share a row is decided in `pack`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from streamrl.learner.packing.prefixes import Prefixes
from streamrl.protocol.wire.branches import Branch
from streamrl.protocol.wire.routes import Routes

NO_ROUTE, NO_TOKEN = -1, -2  # in place of an expert: a token without a route, a cell without a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One sample, ready to be packed."""

    sample: int  # index in the rank's batch
    group: int  # samples of one group have the same prompt
    prompt_ids: npt.NDArray[np.int32]  # [P], at least one
    token_ids: npt.NDArray[np.int32]  # [T] the response, at least one
    behaviour_logprobs: npt.NDArray[np.float32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T] has a loss
    turns: tuple[int, ...] = (0,)  # start of each turn of the model
    branches: tuple[Branch, ...] = ()  # rows besides the first
    routes: Routes | None = None  # [P + T, layers, experts per token]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without the last of each."""
        kept = sum(branch.keep for branch in self.branches)
        return len(self.prompt_ids) + len(self.token_ids) + kept - 1 - len(self.branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    input_ids: torch.Tensor  # [rows, length]
    position_ids: torch.Tensor  # [rows, length] from 0 in each sequence; 0 where the row is empty
    is_token: torch.Tensor  # [rows, length] False where the row is empty
    until: torch.Tensor  # [rows, length] one past the last cell that sees this one; the row's end for empty cells
    index: torch.Tensor  # [T] cell that predicts the token, rows concatenated
    targets: torch.Tensor  # [T] the tokens with a loss
    position: torch.Tensor  # [T] of the token in its response
    in_turn: torch.Tensor  # [T] of the token in its turn
    behaviour_logprobs: torch.Tensor  # [T]
    sample: torch.Tensor  # [T] sample of the token
    starts: torch.Tensor  # [sequences + 1] int32: starts of sequences, rows concatenated; then the last end
    longest: int  # of these sequences
    prefixes: Prefixes | None = None  # the prompts that some of these sequences go on from; only without a mask
    own_tokens: torch.Tensor | None = None  # [t] of T, those predicted by this rank's part of the rows; None: all
    # [rows, length, layers, experts per token], if samples carry routes; on the host until a pass: they may be large
    routes: torch.Tensor | None = None

    def attention_mask(self, window: int | None = None) -> torch.Tensor:
        """[rows, 1, length, length] True: the later cell sees the earlier one, which lies within the window."""
        cells = torch.arange(self.until.shape[1], device=self.until.device)
        seen = (cells[:, None] >= cells) & (cells[:, None] < self.until[:, None, :])
        if window is not None:
            seen &= self.position_ids[:, :, None] - self.position_ids[:, None, :] < window
        return seen[:, None]

    def to(self, device: torch.device) -> MicroBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and name != "routes":
                values[name] = value.to(device, non_blocking=True)
        if self.prefixes is not None:
            values["prefixes"] = self.prefixes.to(device)
        return MicroBatch(**values)


def additive(mask: torch.Tensor) -> torch.Tensor:
    """The mask for attention implementations that add it to their scores."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The form of rows that a model accepts."""

    hidden_size: int
    share_prompts: bool
    padded: bool = True  # rows have equal lengths; else one row of any length
    alone: bool = False  # a row for each sequence
    max_cells: int | None = None  # per micro-batch, if `max_tokens` may exceed memory
    parts: int = 1  # equal parts that rows are cut into, for ranks that share them
    part: int = 0  # the part that this rank computes

    def cost(self, num_rows: int, length: int) -> int:
        """Relative: a layer spends about 24 hidden^2 on a token's projections, 4 hidden length on its attention."""
        return num_rows * length * (6 * self.hidden_size + length)

    def shares(self, piece: Piece) -> bool:
        """Whether this sample hangs on a prompt laid for several. Without a mask, none with branches does."""
        return self.share_prompts and (self.padded or not piece.branches)

    def even(self, length: int) -> int:
        """The smallest length >= `length` that can be cut into equal parts."""
        return -(-length // self.parts) * self.parts
