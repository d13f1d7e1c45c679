"""The file of a mirror: created once, at full size, and mapped into memory, so that it can be patched in place.

Wide elements come first, so that all are aligned. Room is checked and reserved before anything is written: on a memory
file system that fills up later, touching a missing page would kill the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from streamrl.errors import ResourceError
from streamrl.protocol.weights.format import BITS, Bits, TensorMeta
from streamrl.safetensors_header import NAMES, Entry, pack_header

_ALIGN = 64  # of the data's start: for vector loads by processes that map the file


def create_file(path: Path, tensors: Sequence[TensorMeta]) -> Mapping[str, Bits]:
    """Replace the file by one with room for these tensors; return their elements as flat writable views.

    Views stay valid as long as they are referenced, even after the file is removed.
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
    begins = accumulate((tensor.num_bytes for tensor in tensors), initial=0)
    entries = {
        tensor.name: Entry(dtype=NAMES[tensor.dtype], shape=tensor.shape, begin=begin, end=begin + tensor.num_bytes)
        for tensor, begin in zip(tensors, begins, strict=False)
    }
    return pack_header(entries, metadata={"format": "pt"}, align=_ALIGN)  # transformers requires the format


def _reserve(path: Path, num_bytes: int) -> None:
    """Create a file with all its blocks allocated, or raise ResourceError."""
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
        f"the mirror of the weights needs {num_bytes / 1e9:.2f} GB in {folder}, which has {free / 1e9:.2f} GB free; "
        "enlarge that file system (in containers: --shm-size, or a memory-backed volume)"
    )
