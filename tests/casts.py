"""Counts the bf16 copies of layer weights in memory while a model computes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.model.policy import Policy
from streamrl.learner.packing.pack import empty_micro_batch
from streamrl.learner.packing.ways import decoder_of


class Casts(TorchDispatchMode):
    """Bf16 copies as large as a layer's matrix, as long as they have memory: FSDP frees their storage."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self._shapes = {p.shape for p in layers.parameters() if p.ndim == 2}
        self._found: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.most = 0

    @property
    def live(self) -> int:
        return sum(storage.nbytes() > 0 for storage in self._found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local parts are dispatched next
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and out.shape in self._shapes:
            self._found.add(out.untyped_storage())
            self.most = max(self.most, self.live)
        return out


def watch_a_pass(policy: Policy) -> tuple[list[int], list[int]]:
    """Return the number of copies after each layer's forward pass; and the maximum up to then, and overall."""
    layers = decoder_of(policy.model).layers
    assert isinstance(layers, nn.ModuleList)
    casts, after, most = Casts(layers), list[int](), list[int]()

    def note(*_: Any) -> None:
        after.append(casts.live)
        most.append(casts.most)

    for layer in layers:
        layer.register_forward_hook(note)
    with casts:
        policy(empty_micro_batch(policy.shape)).logp.sum().backward()
        after.append(casts.live)
    most.append(casts.most)
    policy.zero_grad()
    return after, most
