"""Memory-maps a safetensors file once, for a file that is patched in place and read repeatedly.

Mapping 272 MB again, page by page, took a seventh of each load. Reads see the file's current contents: the mapping
shares the file's pages, and the header is parsed on every read. Blocks only on the file system.

If the engine is on a GPU, the pages are registered with CUDA, so that a load runs at bus speed instead of through a
driver buffer.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Iterator

import torch

from streamrl.pinning import Pinned
from streamrl.safetensors_header import LENGTH_BYTES, NAMES, header_bytes, parse_header

_DECOY_SUM = 0.0703125  # a value plus its decoy; exact in bf16
_DTYPES = {NAMES[name]: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class MappedFile:
    """Keeps the mapping of the last file it read; uses no memory of its own."""

    def __init__(self, pinned: Pinned | None = None) -> None:
        self._pinned = pinned
        self._identity: tuple[int, int, int] | None = None
        self._contents = torch.empty(0, dtype=torch.uint8)  # [num_bytes] never write to it

    def tensors(self, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) views into the file: copy them before the file changes."""
        self._map(path)
        data_at = LENGTH_BYTES + header_bytes(self._contents[:LENGTH_BYTES].numpy().tobytes())
        for name, entry in parse_header(self._contents[LENGTH_BYTES:data_at].numpy().tobytes()).items():
            elements = self._contents[data_at + entry.begin : data_at + entry.end].view(_DTYPES[entry.dtype])
            yield name, elements.reshape(entry.shape)

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.release()
        self._identity, self._contents = None, torch.empty(0, dtype=torch.uint8)

    def _map(self, path: str) -> None:
        with open(path, "rb" if self._pinned is None else "r+b") as file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino, status.st_size
            if identity != self._identity:
                self.close()
                # CUDA registers only writable memory, although nothing writes to it.
                access = mmap.ACCESS_READ if self._pinned is None else mmap.ACCESS_WRITE
                mapped = mmap.mmap(file.fileno(), 0, access=access)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="The given buffer is not writable")
                    self._contents = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping alive
                self._identity = identity
                if self._pinned is not None:
                    self._pinned.hold(self._contents)


def mapped_for(device: torch.device) -> MappedFile:
    """Return a MappedFile for repeated copies to this device."""
    if device.type != "cuda":
        return MappedFile()
    return MappedFile(Pinned(torch.cuda.cudart(), lambda: torch.ones(1, device=device)))


def decoys(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the same names and shapes with finite values that differ from the given ones, except where a
    value is exactly half of `_DECOY_SUM`."""
    for name, tensor in tensors:
        yield name, _DECOY_SUM - tensor
