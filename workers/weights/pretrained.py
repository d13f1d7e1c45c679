"""The pretrained base model on the worker's machine, into which a run that trains only adapters merges them.

Read from its safetensors files where these hold each tensor under its own name. Otherwise (for example with experts
that transformers fuses) the whole model is loaded once and stays in host memory. Blocks on the disk, and on the hub if
the model is not on this machine yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock

import structlog

from streamrl.errors import DataError
from streamrl.protocol.weights.format import BITS, Bits, TensorMeta
from streamrl.protocol.weights.pretrained import PretrainedFiles

log = structlog.get_logger(__name__)


class PretrainedModel:
    """`protocol.weights.pretrained.Pretrained`."""

    def __init__(self, path: str, *, trust_remote_code: bool) -> None:
        """DataError if the model has no weights here."""
        self._path, self._trust_remote_code = path, trust_remote_code
        self._files = PretrainedFiles(_weight_files(path), name=path)
        self._loaded: Mapping[str, Bits] = {}  # used where the files lack a tensor
        self._loading = Lock()  # tensors are merged concurrently, but the model is loaded only once

    def bits(self, tensor: TensorMeta) -> Bits:
        if tensor in self._files:
            return self._files.bits(tensor)
        with self._loading:
            if not self._loaded:
                reason = f"its files lack {tensor.name}"
                log.info("pretrained model is loaded whole", model=self._path, reason=reason)
                self._loaded = dict(self._load(tensor))
        if tensor.name not in self._loaded or len(self._loaded[tensor.name]) != tensor.num_elements:
            return self._files.bits(tensor)  # raises, and names what is missing
        return self._loaded[tensor.name]

    def _load(self, like: TensorMeta) -> Iterator[tuple[str, Bits]]:
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._path, dtype=getattr(torch, like.dtype), trust_remote_code=self._trust_remote_code
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"model {self._path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
        integers = torch.int32 if BITS[like.dtype].itemsize == 4 else torch.int16
        for name, parameter in model.named_parameters():
            yield name, parameter.detach().contiguous().view(integers).numpy().view(BITS[like.dtype]).reshape(-1)


def _weight_files(path: str) -> list[Path]:
    """Find the weight files in the folder or the hub's cache; empty if the model is not in safetensors."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    def find(name: str) -> Path | None:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    try:
        if (whole := find(SAFE_WEIGHTS_NAME)) is not None:
            return [whole]
        if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
            return []
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return [file for name in names if (file := find(name)) is not None]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the weights of {path!r} cannot be read: {str(error).splitlines()[0]}") from error
