"""What a version of adapters says of the model that they are for: digests, and no bytes.

    at start       each tensor of the frozen model: a worker takes it from its own files, and compares
    each version   some of the merged tensors, computed here from what is trained: a worker merges, and compares

The first version of a learner says all merged tensors, each later one its share, in turn: the loop waits for these. On
a GPU they are merged there. No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from streamrl.learner.model.lora import adapter_parameters, adapters_of, base_parameters, merged
from streamrl.learner.publishing.host_copy import digests_of
from streamrl.protocol.weights.format import Coding, DType, RangeDigest, TensorMeta

_NUM_TURNS = 16  # versions until each merged tensor was told again


class AdapterWords:
    def __init__(self, model: nn.Module, dtype: DType) -> None:
        self._model, self._dtype = model, dtype
        self._torch_dtype: torch.dtype = getattr(torch, dtype)
        self.adapters = adapters_of(model)
        self.pretrained = metas_of(base_parameters(model), dtype) if self.adapters else ()
        self._digests: tuple[RangeDigest, ...] | None = None  # of the frozen model, once they were asked for
        self._turn = 0

    def take(self) -> list[RangeDigest]:
        """For the version that is made now. A collective."""
        if not self.adapters:
            return []
        base = dict(base_parameters(self._model))
        if self._digests is None:
            self._digests = tuple(digests_of(base.items(), self._dtype, Coding.PRETRAINED))
        factors = dict(adapter_parameters(self._model))
        told = self.adapters[self._turn % _NUM_TURNS :: _NUM_TURNS] if self._turn else self.adapters
        self._turn += 1
        tensors = ((one.tensor, merged(base[one.tensor], one, factors, self._torch_dtype)) for one in told)
        return [*self._digests, *digests_of(tensors, self._dtype, Coding.MERGED)]


def metas_of(tensors: Iterable[tuple[str, torch.Tensor]], dtype: DType) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(name=name, dtype=dtype, shape=tuple(tensor.shape)) for name, tensor in tensors)
