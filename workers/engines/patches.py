"""What changed in the mirror, put into an engine's own places: a file that the engine's process has but to copy.

    Changed: checkpoint tensors ─► Place: where each lies in the engine, and in which form ─► patch file ─► engine

It is made in the worker's process, so that of all this work only the copy is the engine's. A place is a stretch of
rows: `q_proj` has rows 0 to 575 of `qkv_proj`, `k_proj` those after it.

    rows    as in the checkpoint, row after row
    tiles   of 32 rows by 2 columns, as vLLM's kernel `weight_packed_linear` reads them (`vllm_linears`)
    layer   in a form of the kernel's own: the layer is made anew of all its tensors
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from streamrl.protocol.weights.changes import Changed, Elements
from streamrl.protocol.weights.format import Bits

TILE_ROWS, TILE_COLUMNS = 32, 2
_ALIGN = 8  # bytes

Kind = Literal["rows", "tiles", "layer"]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    tensor: str  # the checkpoint's
    parameter: str  # the engine's
    kind: Kind
    first_row: int
    width: int  # elements of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The header of the file: what stands beside the elements, which are `INDEX` and `BITS` of each target."""

    since: int  # the version that the engine must have
    targets: tuple[tuple[str, Kind], ...]  # parameters, elements of which are written
    whole: tuple[str, ...]  # tensors that are copied as they are
    layers: tuple[str, ...]  # parameters that are made anew


def write_patch(changed: Changed, places: Sequence[Place], path: Path) -> str | None:
    """None: it is written. Otherwise why all weights have to be loaded."""
    by_tensor: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_tensor[place.tensor].append(place)
    names = (*changed.elements, *changed.whole)
    unknown = sorted(name for name in names if name not in by_tensor)
    if unknown:
        return f"where {unknown[0]} goes is not known"
    layers = {place.parameter for name in names for place in by_tensor[name] if place.kind == "layer"}
    parts: dict[tuple[str, Kind], list[tuple[Index, Bits]]] = defaultdict(list)
    for name, elements in changed.elements.items():
        for place in by_tensor[name]:
            if place.kind != "layer":
                parts[place.parameter, place.kind].append((_index(elements, place), elements.bits))
    patch = Patch(since=changed.since, targets=tuple(parts), whole=changed.whole, layers=tuple(sorted(layers)))
    _write(path, patch, parts)
    return None


def _index(elements: Elements, place: Place) -> Index:
    """In the flat memory of the place's parameter."""
    index: Index = elements.positions + place.first_row * place.width
    if place.kind == "tiles" and len(index):
        # Numbers of 4 bytes where they are enough: twice as many at once. And no more passes than it takes.
        narrow = index.astype(np.int32) if index.max() < 1 << 31 else index
        rows = narrow // place.width
        columns = narrow - rows * place.width
        rows &= TILE_ROWS - 1  # within the tile
        rows *= TILE_COLUMNS - place.width
        columns >>= 1
        columns *= TILE_COLUMNS * TILE_ROWS - TILE_COLUMNS  # TILE_COLUMNS of a row lie side by side
        index += rows
        index += columns
    return index


def _write(path: Path, patch: Patch, parts: Mapping[tuple[str, Kind], list[tuple[Index, Bits]]]) -> None:
    header = json.dumps(asdict(patch)).encode()
    header += b" " * (-len(header) % _ALIGN)
    # Into memory that the file has already: what is made anew for it comes page by page. What lies behind the end of
    # this patch is an older one's.
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(len(header).to_bytes(_ALIGN, "little") + header)
        for target in patch.targets:
            stretches = parts[target]
            itemsize = stretches[0][1].itemsize
            num = sum(len(index) for index, _ in stretches)
            file.write(np.array([num, itemsize], dtype="<i8").tobytes())
            file.writelines(index.data for index, _ in stretches)
            file.writelines(bits.data for _, bits in stretches)
            file.write(bytes(-num * itemsize % _ALIGN))


def read_patch(path: Path) -> tuple[Patch, Iterator[tuple[str, Kind, Index, Bits]]]:
    """The elements are views into the file, which nobody may write to meanwhile."""
    contents = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
    begin = _ALIGN + int(contents[:_ALIGN].view("<i8")[0])
    said: dict[str, Any] = json.loads(contents[_ALIGN:begin].tobytes())
    targets = tuple((parameter, kind) for parameter, kind in said["targets"])
    patch = Patch(since=said["since"], targets=targets, whole=tuple(said["whole"]), layers=tuple(said["layers"]))
    return patch, _elements(contents[begin:], patch)


def _elements(contents: npt.NDArray[np.uint8], patch: Patch) -> Iterator[tuple[str, Kind, Index, Bits]]:
    for parameter, kind in patch.targets:
        num, itemsize = (int(value) for value in contents[:16].view("<i8"))
        bits_at = 16 + 8 * num
        end = bits_at + num * itemsize
        yield parameter, kind, contents[16:bits_at].view("<i8"), contents[bits_at:end].view(f"<u{itemsize}")
        contents = contents[end + -end % _ALIGN :]
