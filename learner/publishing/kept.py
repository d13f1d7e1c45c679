"""What the files of a model hold beside its parameters: buffers, such as the biases by which some routers choose.

Training never changes them, and engines have no other source of weights than versions, so each version has them. In
float32, whatever parameters are served in: what such a bias is added to differs by less than bfloat16 can tell. Each
rank has all of them, rank 0 tells.
"""

from __future__ import annotations

import torch
from torch import nn

from streamrl.learner.model.lora import base_name
from streamrl.learner.parallel.dtensors import kept_in
from streamrl.learner.publishing.host_copy import CastDigests, Part
from streamrl.protocol.weights.format import HeldRange, TensorMeta, digest_of


class Kept:
    def __init__(self, model: nn.Module, *, tells: bool) -> None:
        self._model, self._tells = model, tells
        self.metas = tuple(
            TensorMeta(name=base_name(name), dtype="float32", shape=tuple(buffer.shape))
            for name, buffer in kept_in(model)
        )

    def take(self) -> Part | None:
        """None: this rank has nothing to tell."""
        if not (self._tells and self.metas):
            return None
        held = []
        for name, buffer in kept_in(self._model):
            values = (
                torch.empty(buffer.shape, dtype=torch.float32).copy_(buffer.detach()).view(-1)
            )  # never its own memory
            held.append(HeldRange(tensor=base_name(name), start=0, bits=values.numpy().view("<u4")))
        return Part(ranges=held, check=lambda: None)

    def digests(self) -> CastDigests:
        part = self.take()
        return {} if part is None else {(one.tensor, one.start): digest_of(one.bits.data) for one in part.ranges}
