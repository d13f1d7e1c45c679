"""The buffers in a model's files beside its parameters, such as the bias with which some routers choose experts.

Training never changes them, but engines have no source of weights other than versions, so each version has them. They
are float32 whatever the parameters' dtype: such a bias is added to values that differ by less than bfloat16
resolves. Each rank holds all of them; rank 0 publishes.
"""

from __future__ import annotations

import torch
from torch import nn

from streamrl.learner.model.lora import base_name
from streamrl.learner.parallel.dtensors import persistent_buffers
from streamrl.learner.publishing.host_copy import CastDigests, Part
from streamrl.protocol.weights.format import HeldRange, TensorMeta, digest_of


class PublishedBuffers:
    def __init__(self, model: nn.Module, *, publishes: bool) -> None:
        self._model, self._publishes = model, publishes
        self.metas = tuple(
            TensorMeta(name=base_name(name), dtype="float32", shape=tuple(buffer.shape))
            for name, buffer in persistent_buffers(model)
        )

    def take(self) -> Part | None:
        """Return the buffers; None if this rank publishes none."""
        if not (self._publishes and self.metas):
            return None
        held = []
        for name, buffer in persistent_buffers(self._model):
            values = torch.empty(buffer.shape, dtype=torch.float32).copy_(buffer.detach()).view(-1)  # always a copy
            held.append(HeldRange(tensor=base_name(name), start=0, bits=values.numpy().view("<u4")))
        return Part(ranges=held, check=lambda: None)

    def digests(self) -> CastDigests:
        part = self.take()
        return {} if part is None else {(one.tensor, one.start): digest_of(one.bits.data) for one in part.ranges}
