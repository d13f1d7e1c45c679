"""The ranks of one learner: who I am, and the few things ranks say to each other.

Numbers travel as tensors and texts as bytes in tensors, never as pickles. Collectives of control run on the CPU (gloo)
so that they cost a GPU nothing; those of the model run where the model is. Each blocks until all ranks have come, at
most for the group's timeout; with one rank there is no group and nothing blocks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl import process
from streamrl.config import schema
from streamrl.config.layout import refuse_layout
from streamrl.errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    size: int
    device: torch.device
    layout: schema.Layout = field(default_factory=schema.Layout)
    group: dist.ProcessGroup | None = None  # None: the one of the loop
    context_group: dist.ProcessGroup | None = None  # of those that have parts of samples; None: each has them whole
    timeout: timedelta | None = None  # of groups that are made of it; None: torch's
    here: int = 1  # ranks on this machine

    def under(self, layout: schema.Layout) -> World:
        """The same ranks, which divide the model so; ConfigError where they cannot."""
        refuse_layout(layout, self.size)
        return replace(self, layout=layout, context_group=self._context_group(layout))

    def _context_group(self, layout: schema.Layout) -> dist.ProcessGroup | None:
        """A collective: every rank makes all groups."""
        if layout.context == 1:
            return None
        apart, together = layout.tensor, layout.context * layout.tensor
        starts = [start + at for start in range(0, self.size, together) for at in range(apart)]
        groups = [dist.new_group(list(range(start, start + together, apart)), timeout=self.timeout) for start in starts]
        own: dist.ProcessGroup = groups[self.rank // together * apart + self.rank % apart]
        return own

    def beside(self, *, timeout_s: float) -> World:
        """The same ranks, for a thread beside the loop, or for waiting longer than the loop does: what they say to each
        other here never meets what the loop says."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sharers(self) -> int:
        """So many ranks in a row have the same samples: those of a context group, and with each of these, those that
        share its layers."""
        return self.layout.context * self.layout.tensor

    @property
    def data_rank(self) -> int:
        """Whose groups of a step are this rank's."""
        return self.rank // self.sharers

    @property
    def data_size(self) -> int:
        """How many there are to have groups of their own."""
        return self.size // self.sharers

    @property
    def speaks(self) -> bool:
        """For the ranks that have all seen the same samples."""
        return self.rank % self.sharers == 0

    @property
    def addends(self) -> int:
        """Of how many ranks the gradients of a weight add up to that of the step: ranks that share layers each have the
        same one of what they do not divide, and else that of their own part."""
        return self.size // self.layout.tensor

    def mesh(self) -> DeviceMesh:
        """Of all ranks, to shard a model over: (replicas, shards) where there are several replicas, else (shards,). Of
        a single rank too, for what FSDP does beside sharding."""
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it, and does not list it as public
            dist.init_process_group(_backend(self.device), store=store, rank=0, world_size=1)
        replicas = self.layout.replicas
        if replicas == 1:
            return init_device_mesh(self.device.type, (self.size,))
        return init_device_mesh(
            self.device.type, (replicas, self.size // replicas), mesh_dim_names=("replicas", "shards")
        )

    def expert_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """(of ranks that hold the same experts, to shard these over; of ranks that follow each other, to divide experts
        among)"""
        return self._meshes("experts", self.layout.experts)

    def tensor_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """(of ranks that hold the same part of each layer, to shard it over; of ranks that follow each other, to divide
        layers among)"""
        return self._meshes("tensor", self.layout.tensor)

    def _meshes(self, name: str, parts: int) -> tuple[DeviceMesh, DeviceMesh]:
        replicas = self.layout.replicas
        dimensions = {"holders": self.size // replicas // parts, name: parts}
        if replicas > 1:
            dimensions = {"replicas": replicas, **dimensions}
        mesh = init_device_mesh(self.device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
        return mesh["holders"] if replicas == 1 else mesh["replicas", "holders"], mesh[name]

    def barrier(self) -> None:
        self.total(np.zeros(1))

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None."""
        if self.size == 1:
            assert data is not None
            return data
        length = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(length, src=0, group=self.group)
        payload = torch.zeros(int(length), dtype=torch.uint8) if data is None else _to_tensor(data)
        dist.broadcast(payload, src=0, group=self.group)
        return payload.numpy().tobytes()

    def total(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def total_of_data(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of what ranks know of their samples, each sample once."""
        return self.total(values if self.speaks else np.zeros_like(values))

    def largest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def all_agree(self, mine: bool) -> bool:
        return bool(self.largest(np.array([0.0 if mine else 1.0]))[0] == 0.0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in the order of ranks; all ranks receive them."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        room = max(int(n) for n in lengths)
        mine = torch.zeros(room, dtype=torch.uint8)
        mine[: len(data)] = _to_tensor(data)
        parts = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]

    def _reduce(self, values: npt.NDArray[np.float64], op: dist.ReduceOp.RedOpType) -> npt.NDArray[np.float64]:
        if self.size == 1:
            return values
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor.numpy()


@contextmanager
def join_world(environment: Mapping[str, str], *, timeout_s: float, gpu_memory: float | None = None) -> Iterator[World]:
    """The world that torchrun's variables describe; without them, a world of one. `gpu_memory`: the share of its GPU's
    memory beyond which this rank, and not who shares the GPU, is out of memory. No GPU has run this."""
    rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        if gpu_memory is not None:
            torch.cuda.set_per_process_memory_fraction(gpu_memory, device)
    if size > 1:
        dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s))
    try:
        here = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        yield World(rank=rank, size=size, device=device, timeout=timedelta(seconds=timeout_s), here=here)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def die_with_parent(parent: int) -> None:
    """End this rank at once when torchrun's agent (`parent`, as seen at the start) ends, even by kill -9.

    Without it orphaned ranks go on training (measured), beside the ones that replace them.
    """
    process.die_with_parent()
    if os.getppid() != parent:  # it died before the line above took effect
        raise TrainingError("the process that started this rank is gone")


def show_rank(rank: str) -> None:
    """In `ps` and `top`, where all ranks of a machine look alike."""
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(f"rank-{rank}")
