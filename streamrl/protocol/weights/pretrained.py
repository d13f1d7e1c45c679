"""The pretrained model's own tensors, read from its files: adapters are merged into them.

Read from the mapped files on each access, so that they take no memory besides the page cache. No model code runs, and
neither torch nor transformers is needed. Blocks on the file system.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from streamrl.errors import DataError
from streamrl.protocol.weights.adapters import bits_of, floats
from streamrl.protocol.weights.format import BITS, Bits, DType, TensorMeta

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
_DTYPES: Mapping[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Pretrained(Protocol):
    """Source of pretrained tensors. As a double, use any file that the mirror's `create_file` writes."""

    def bits(self, tensor: TensorMeta) -> Bits:
        """Return [num_elements] in the tensor's dtype, read-only. DataError: the model has no such tensor."""
        ...


class PretrainedFiles:
    def __init__(self, files: Iterable[Path], *, name: str) -> None:
        """`name` is the model's, for messages. DataError: a file is not safetensors."""
        self._name = name
        self._tensors: dict[str, tuple[DType, tuple[int, ...], Bits]] = {}  # by name: flat, in the file's dtype
        for file in files:
            self._open(file)

    def __contains__(self, tensor: TensorMeta) -> bool:
        found = self._tensors.get(tensor.name)
        return found is not None and found[1] == tensor.shape

    def bits(self, tensor: TensorMeta) -> Bits:
        if tensor not in self:
            raise DataError(
                f"the model {self._name!r} has no {tensor.name} {list(tensor.shape)}, which the learner trains"
            )
        dtype, _, bits = self._tensors[tensor.name]
        return bits if dtype == tensor.dtype else bits_of(floats(bits, dtype), tensor.dtype)

    def _open(self, file: Path) -> None:
        try:
            contents = np.memmap(file, dtype=np.uint8, mode="r")
            data_at = _LENGTH_BYTES + int.from_bytes(contents[:_LENGTH_BYTES].tobytes(), "little")
            header = json.loads(contents[_LENGTH_BYTES : min(data_at, _MAX_HEADER_BYTES)].tobytes())
            for name, entry in header.items():
                if name != "__metadata__" and entry["dtype"] in _DTYPES:
                    dtype = _DTYPES[entry["dtype"]]
                    begin, end = (data_at + offset for offset in entry["data_offsets"])
                    bits = contents[begin:end].view(np.ndarray).view(BITS[dtype])
                    self._tensors[name] = dtype, tuple(entry["shape"]), bits
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} cannot be read as safetensors: {error}") from error
