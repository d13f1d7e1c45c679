"""The weights as they will be served, copied to the host: what is encoded while the optimizer goes on.

The loop waits for this copy, and for little else of a publish. It comes in parts, so that the first is encoded while
the next is copied. The memory is used again for the next version, so a copy is to be encoded before the next is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from learner.policy.lora import merged_parameters
from learner.policy.tensors import held
from streamrl.weights.format import DType, HeldRange

_PART_BYTES = 8 << 20  # or a tensor that is larger


class HostCopy:
    def __init__(self, dtype: DType) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._integers = torch.int32 if self._dtype == torch.float32 else torch.int16
        self._buffers: dict[str, torch.Tensor] = {}  # [length] of the runs that this rank holds

    def take(self, model: nn.Module) -> Iterator[list[HeldRange]]:
        """All that this rank holds, some tensors at a time."""
        part: list[HeldRange] = []
        for name, parameter in merged_parameters(model):
            run = held(parameter, shape=parameter.shape)
            if len(run.values):
                buffer = self._buffer(name, run.values)
                buffer.copy_(run.values)
                bits = buffer.view(self._integers).numpy()
                part.append(HeldRange(tensor=name, start=run.start, bits=bits.view(f"<u{bits.itemsize}")))
            if sum(one.bits.nbytes for one in part) >= _PART_BYTES:
                yield part
                part = []
        yield part

    def _buffer(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name not in self._buffers:
            # Pinned, a copy from a GPU goes at the speed of its bus.
            self._buffers[name] = torch.empty(len(values), dtype=self._dtype, pin_memory=values.is_cuda)
        return self._buffers[name]
