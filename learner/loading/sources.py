"""Where a parameter's values are in files, so that a rank reads only its own rows.

    Stored    a tensor of a file
    Stacked   many tensors as one parameter, like experts: row i is the whole i-th tensor
    Joined    several concatenated along a dimension, like gate and up within an expert
    Cut       the n-th of equal parts of one
    Unpacked  blocks of four-bit numbers and their scales (MXFP4), expert by expert

Each fills a region, a range of each dimension, from its parts' regions: a rank that holds the experts [a, b) never
touches the files of the others. Besides the target, memory holds one piece of a file, at most `_PIECE_BYTES`, or one
unpacked expert. Blocks on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from streamrl.learner.parallel.dtensors import held_rows

_PIECE_BYTES = 16 << 20  # size of the target's part
# A file's mapped pages count as this process's memory while it is open.
_OPEN_BYTES = 32 << 20

_T = TypeVar("_T")
Region = tuple[tuple[int, int], ...]  # [first, end) of each dimension


class Files:
    """Files that open on demand, and close again after much was read from them."""

    def __init__(self) -> None:
        self._stack, self._opened, self._num_bytes = ExitStack(), dict[Path, Any](), 0

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, path: Path, name: str, region: Region) -> torch.Tensor:
        if self._num_bytes >= _OPEN_BYTES:
            self._close()
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        found: torch.Tensor = self._opened[path].get_slice(name)[tuple(slice(*one) for one in region)]
        self._num_bytes += found.nbytes
        return found

    def _close(self) -> None:
        self._stack.close()
        self._opened.clear()
        self._num_bytes = 0


class Source(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    def fill(self, target: torch.Tensor, region: Region, files: Files) -> None:
        """Fill the target, which has the region's shape, with the region's values, cast to its dtype."""
        ...


# Parameter name (without adapters) -> its source; empty for a model that is already loaded.
Sources = dict[str, Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    path: Path
    name: str  # within the file
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    def fill(self, target: torch.Tensor, region: Region, files: Files) -> None:
        for part, of_target in _pieces(region, target.element_size()):
            target[of_target].copy_(files.read(self.path, self.name, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    parts: Sequence[Source]  # of one shape
    dim: int
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        one = self.parts[0].shape
        object.__setattr__(self, "shape", (*one[: self.dim], len(self.parts), *one[self.dim :]))

    def fill(self, target: torch.Tensor, region: Region, files: Files) -> None:
        begin, end = region[self.dim]
        within = (*region[: self.dim], *region[self.dim + 1 :])
        for at in range(begin, end):
            self.parts[at].fill(target.select(self.dim, at - begin), within, files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    parts: Sequence[Source]
    dim: int
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        length = sum(part.shape[self.dim] for part in self.parts)
        object.__setattr__(self, "shape", _with(self.parts[0].shape, self.dim, length))

    def fill(self, target: torch.Tensor, region: Region, files: Files) -> None:
        begin, end = region[self.dim]
        first = 0
        for part in self.parts:
            low, high = max(begin, first), min(end, first + part.shape[self.dim])
            if low < high:
                within = _with(region, self.dim, (low - first, high - first))
                part.fill(target.narrow(self.dim, low - begin, high - low), within, files)
            first += part.shape[self.dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    of: Source
    dim: int
    begin: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return _with(self.of.shape, self.dim, self.length)

    def fill(self, target: torch.Tensor, region: Region, files: Files) -> None:
        begin, end = region[self.dim]
        self.of.fill(target, _with(region, self.dim, (self.begin + begin, self.begin + end)), files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """[experts, outputs, groups, 16] bytes and [experts, outputs, groups] exponents -> [experts, inputs, outputs]."""

    blocks: Source
    scales: Source

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, num_bytes = self.blocks.shape
        return experts, groups * num_bytes * 2, outputs

    def fill(self, target: torch.Tensor, region: Region, files: Files) -> None:
        begin, end = region[0]
        within = tuple(slice(*one) for one in region[1:])
        for expert in range(begin, end):
            blocks, scales = (_whole_row(part, expert, files) for part in (self.blocks, self.scales))
            target[expert - begin].copy_(convert_moe_packed_tensors(blocks, scales)[0][within])


@torch.no_grad()
def read_rows(source: Source, tensor: torch.Tensor, files: Files) -> None:
    """Read what this rank holds of the tensor."""
    first, rows = held_rows(tensor)
    if rows.numel():
        source.fill(rows, ((first, first + len(rows)), *((0, size) for size in source.shape[1:])), files)


def _whole_row(source: Source, row: int, files: Files) -> torch.Tensor:
    row_alone = torch.empty((1, *source.shape[1:]), dtype=torch.uint8)
    source.fill(row_alone, ((row, row + 1), *((0, size) for size in source.shape[1:])), files)
    return row_alone


def _pieces(region: Region, element_size: int) -> Iterator[tuple[Region, tuple[slice, ...]]]:
    """The region as runs along its first dimension, each with its place in the target."""
    begin, end = region[0]
    row = element_size
    for low, high in region[1:]:
        row *= high - low
    num_rows = max(1, _PIECE_BYTES // max(row, 1))
    for first in range(begin, end, num_rows):
        last = min(first + num_rows, end)
        yield ((first, last), *region[1:]), (slice(first - begin, last - begin),)


def _with(values: tuple[_T, ...], at: int, value: _T) -> tuple[_T, ...]:
    return (*values[:at], value, *values[at + 1 :])
