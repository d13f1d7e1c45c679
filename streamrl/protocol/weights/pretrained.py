"""The pretrained model's own tensors, read from its files: adapters are merged into them.

Read from the mapped files on each access, so that they take no memory besides the page cache. No model code runs, and
neither torch nor transformers is needed. Blocks on the file system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from streamrl.errors import DataError
from streamrl.protocol.weights.adapters import bits_of, floats
from streamrl.protocol.weights.format import BITS, Bits, DType, TensorMeta
from streamrl.safetensors_header import LENGTH_BYTES, NAMES, header_bytes, parse_header

_DTYPES: Mapping[str, DType] = {NAMES[name]: name for name in BITS}


class Pretrained(Protocol):
    """Source of pretrained tensors. As a double, use any file that `mirror_file.create_file` makes."""

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
            data_at = LENGTH_BYTES + header_bytes(contents[:LENGTH_BYTES].tobytes())
            for name, entry in parse_header(contents[LENGTH_BYTES:data_at].tobytes()).items():
                if (dtype := _DTYPES.get(entry.dtype)) is not None:
                    bits = contents[data_at + entry.begin : data_at + entry.end].view(np.ndarray).view(BITS[dtype])
                    self._tensors[name] = dtype, entry.shape, bits
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} cannot be read as safetensors: {error}") from error
