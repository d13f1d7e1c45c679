"""A safetensors file made for patching in place: laid out once, at full size, and mapped into memory.

    8 bytes   length of the header, little-endian
    header    JSON: tensor name -> dtype, shape, begin and end of its bytes in the data; padded with spaces
    data      the tensors, wide elements first, without holes

Room is checked and reserved before anything is written: a memory file system that runs full later would kill the
process at its first touch of a missing page. Blocks on the file system only.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from streamrl.errors import ResourceError
from streamrl.protocol.weights.format import BITS, Bits, DType, TensorMeta

_LENGTH_BYTES = 8
_ALIGN = 64  # of the data's begin: vector loads of whoever maps the file
_SAFETENSORS: Mapping[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def create(path: Path, tensors: Sequence[TensorMeta]) -> Mapping[str, Bits]:
    """Replace the file by one that has room for these tensors; their elements as flat views to write to.

    Views stay valid as long as anybody holds one, also after the file was removed.
    """
    laid_out = sorted(tensors, key=lambda tensor: -BITS[tensor.dtype].itemsize)  # stable; keeps all elements aligned
    header = _header(laid_out)
    num_bytes = len(header) + sum(tensor.num_bytes for tensor in tensors)
    aside = path.with_name(path.name + ".part")
    path.unlink(missing_ok=True)
    aside.unlink(missing_ok=True)
    try:
        _reserve(aside, num_bytes)
        contents = np.memmap(aside, dtype=np.uint8, mode="r+", shape=(num_bytes,))
        contents[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    views, begin = {}, len(header)
    for tensor in laid_out:
        views[tensor.name] = contents[begin : begin + tensor.num_bytes].view(np.ndarray).view(BITS[tensor.dtype])
        begin += tensor.num_bytes
    return views


def _header(tensors: Sequence[TensorMeta]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # what transformers asks for
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGN)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _reserve(path: Path, num_bytes: int) -> None:
    """A new file with all its blocks, or one ResourceError."""
    stats = os.statvfs(path.parent)
    free = stats.f_bavail * stats.f_frsize
    if num_bytes > free:
        raise ResourceError(_no_room(path.parent, num_bytes, free))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise ResourceError(_no_room(path.parent, num_bytes, free)) from error
    finally:
        os.close(descriptor)


def _no_room(folder: Path, num_bytes: int, free: int) -> str:
    return (
        f"the mirror of the weights needs {num_bytes / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free; "
        "give that file system more room (in containers: --shm-size, or a memory-backed volume)"
    )
