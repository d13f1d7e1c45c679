"""A rank whose peers do not exist (torch's fake process group), and the size of its communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.process.ranks import World

_GETS_BY = {"_allgather_base_": 0, "_reduce_scatter_base_": 0, "alltoall_base_": 0}  # index of the output argument


@contextmanager
def nowhere(num_ranks: int) -> Iterator[World]:
    """Be the first of so many ranks. What it receives is whatever its memory held."""
    if dist.is_initialized():  # with a single rank, by an earlier test
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield World(rank=0, size=num_ranks, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


class Said(TorchDispatchMode):
    """Counts the bytes that this rank receives, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _GETS_BY:
            self._add(name, args[_GETS_BY[name]])
        elif name == "all_to_all_single":
            self._add(name, out)
        elif name == "allreduce_":
            for tensor in args[0]:
                self._add(name, tensor)
        return out

    def _add(self, name: str, got: torch.Tensor) -> None:
        self.bytes_of[name] += got.numel() * got.element_size()
