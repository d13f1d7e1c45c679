"""The header of a safetensors file, for those who lay files out in place, or read them without the package.

    8 bytes   length of the header, little-endian
    header    JSON: tensor name -> dtype, shape, begin and end of its bytes in the data; padded with spaces
    data      the tensors, without holes

Imports neither torch nor safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

LENGTH_BYTES = 8
_MAX_BYTES = 100 << 20  # of a header, as safetensors has it
_METADATA = "__metadata__"
# By the names that torch and our configuration have for them.
NAMES: Mapping[str, str] = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    begin: int  # in the data
    end: int


def pack_header(entries: Mapping[str, Entry], *, metadata: Mapping[str, str], align: int = LENGTH_BYTES) -> bytes:
    """Return what precedes the data; its length is a multiple of `align`."""
    layout: dict[str, object] = {_METADATA: dict(metadata)}
    for name, entry in entries.items():
        offsets = [entry.begin, entry.end]
        layout[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(layout, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % align)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(first: bytes) -> int:
    """Return the length of the header, from the file's first `LENGTH_BYTES`. ValueError if it has none."""
    length = int.from_bytes(first, "little")
    if len(first) != LENGTH_BYTES or length > _MAX_BYTES:
        raise ValueError("it has no header of safetensors")
    return length


def parse_header(text: bytes) -> dict[str, Entry]:
    """Return the tensors' entries. ValueError, KeyError or TypeError if it is none."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("its header is no map")
    return {
        name: Entry(dtype=entry["dtype"], shape=tuple(entry["shape"]), begin=begin, end=end)
        for name, entry in found.items()
        if name != _METADATA
        for begin, end in [entry["data_offsets"]]
    }
