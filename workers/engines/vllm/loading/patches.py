"""Translates a delta of the mirror into a patch file that an engine process applies by copying alone.

    Changed: checkpoint tensors ─► Place: where each lies in the engine, and in which layout ─► patch file ─► engine

The worker process writes the file, so that the engine spends time only on the copy. A place is a contiguous range of
rows: `q_proj` fills rows 0 to 575 of `qkv_proj`, `k_proj` the rows after it.

    rows    as in the checkpoint, row by row
    tiles   of 32 rows by 2 columns, as vLLM's kernel `weight_packed_linear` reads them (`linears`)
    layer   in a layout private to the kernel: the layer is rebuilt from all its tensors
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
    tensor: str  # name in the checkpoint
    parameter: str  # name in the engine
    kind: Kind
    first_row: int
    width: int  # elements per row


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The file's header. The body holds, for each target, an `Index` array and a `Bits` array."""

    since: int  # the version the engine must hold
    targets: tuple[tuple[str, Kind], ...]  # parameters with single changed elements
    whole: tuple[str, ...]  # tensors copied whole
    layers: tuple[str, ...]  # parameters whose layers are rebuilt


def write_patch(changed: Changed, places: Sequence[Place], path: Path) -> str | None:
    """Write the patch and return None, or return why all weights have to be loaded instead."""
    by_tensor: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_tensor[place.tensor].append(place)
    names = (*changed.elements, *changed.whole)
    unknown = sorted(name for name in names if name not in by_tensor)
    if unknown:
        return f"the place of {unknown[0]} in the engine is unknown"
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
    """Return positions in the flat memory of the place's parameter."""
    index: Index = elements.positions + place.first_row * place.width
    if place.kind == "tiles" and len(index):
        # int32 where it is wide enough, for twice the SIMD throughput; and as few passes as possible.
        narrow = index.astype(np.int32) if index.max() < 1 << 31 else index
        rows = narrow // place.width
        columns = narrow - rows * place.width
        rows &= TILE_ROWS - 1  # within the tile
        rows *= TILE_COLUMNS - place.width
        columns >>= 1
        columns *= TILE_COLUMNS * TILE_ROWS - TILE_COLUMNS  # TILE_COLUMNS of a row are adjacent
        index += rows
        index += columns
    return index


def _write(path: Path, patch: Patch, parts: Mapping[tuple[str, Kind], list[tuple[Index, Bits]]]) -> None:
    header = json.dumps(asdict(patch)).encode()
    header += b" " * (-len(header) % _ALIGN)
    # Overwrite the existing file: newly allocated pages are faulted in one by one. Bytes past the end of this patch
    # belong to an older one.
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(len(header).to_bytes(_ALIGN, "little") + header)
        for target in patch.targets:
            stretches = parts[target]
            itemsize = stretches[0][1].itemsize
            num_elements = sum(len(index) for index, _ in stretches)
            file.write(np.array([num_elements, itemsize], dtype="<i8").tobytes())
            file.writelines(index.data for index, _ in stretches)
            file.writelines(bits.data for _, bits in stretches)
            file.write(bytes(-num_elements * itemsize % _ALIGN))


def read_patch(path: Path) -> tuple[Patch, Iterator[tuple[str, Kind, Index, Bits]]]:
    """Return the header and an iterator of views into the file, which must not be written to meanwhile."""
    contents = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
    begin = _ALIGN + int(contents[:_ALIGN].view("<i8")[0])
    header: dict[str, Any] = json.loads(contents[_ALIGN:begin].tobytes())
    targets = tuple((parameter, kind) for parameter, kind in header["targets"])
    patch = Patch(since=header["since"], targets=targets, whole=tuple(header["whole"]), layers=tuple(header["layers"]))
    return patch, _elements(contents[begin:], patch)


def _elements(contents: npt.NDArray[np.uint8], patch: Patch) -> Iterator[tuple[str, Kind, Index, Bits]]:
    for parameter, kind in patch.targets:
        num_elements, itemsize = (int(value) for value in contents[:16].view("<i8"))
        bits_at = 16 + 8 * num_elements
        end = bits_at + num_elements * itemsize
        yield parameter, kind, contents[16:bits_at].view("<i8"), contents[bits_at:end].view(f"<u{itemsize}")
        contents = contents[end + -end % _ALIGN :]
