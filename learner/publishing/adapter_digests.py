"""The digests that a version of adapters carries for the model they belong to, without bytes.

    at start       each tensor of the frozen model: a worker takes it from its own files, and compares
    each version   some of the merged tensors, computed here from the trained parameters: a worker merges, and compares

A learner's first version carries digests of all merged tensors, each later one its share, in turn. The loop waits for
these; on a GPU they are merged there. No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from streamrl.learner.model.lora import adapter_parameters, adapters_of, base_parameters, merged
from streamrl.learner.publishing.host_copy import digests_of
from streamrl.protocol.weights.format import Coding, DType, RangeRecord, TensorMeta

_NUM_TURNS = 16  # number of versions that cover all merged tensors


class AdapterDigests:
    def __init__(self, model: nn.Module, dtype: DType) -> None:
        self._model, self._dtype = model, dtype
        self._torch_dtype: torch.dtype = getattr(torch, dtype)
        self.adapters = adapters_of(model)
        self.pretrained = metas_of(base_parameters(model), dtype) if self.adapters else ()
        self._digests: tuple[RangeRecord, ...] | None = None  # of the frozen model, once computed
        self._turn = 0

    def take(self) -> list[RangeRecord]:
        """Return the digests for the next version: the same share again until `keep`. A collective."""
        if not self.adapters:
            return []
        base = dict(base_parameters(self._model))
        if self._digests is None:
            self._digests = tuple(digests_of(base.items(), self._dtype, Coding.PRETRAINED))
        factors = dict(adapter_parameters(self._model))
        chosen = self.adapters[self._turn % _NUM_TURNS :: _NUM_TURNS] if self._turn else self.adapters
        tensors = (
            (adapter.tensor, merged(base[adapter.tensor], adapter, factors, self._torch_dtype)) for adapter in chosen
        )
        return [*self._digests, *digests_of(tensors, self._dtype, Coding.MERGED)]

    def keep(self) -> None:
        """The version of the last digests was announced: the next one has other tensors' turn."""
        self._turn += 1


def metas_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: DType) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor in tensors)
