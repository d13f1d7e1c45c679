"""The ranks of one learner: identity, layout and small collectives.

Numbers travel as tensors and texts as bytes in tensors, never as pickles. Control collectives run on the CPU (gloo), so
they cost a GPU nothing; the model's run on its device. Each blocks until all ranks have joined, at most for the group's
timeout; a single rank has no group and never blocks.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
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
    group: dist.ProcessGroup | None = None  # None: the loop's
    context_group: dist.ProcessGroup | None = None  # ranks that hold parts of the same samples; None: samples are whole
    timeout: timedelta | None = None  # of groups made from it; None: torch's default
    local_size: int = 1  # ranks on this machine
    # Of groups of some of the ranks, by dimensions: models share them, since each group has memory and connections
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def alone(cls) -> World:
        """A world of one, on this process's GPU if there is one."""
        gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        return cls(rank=0, size=1, device=gpu or torch.device("cpu"))

    def under(self, layout: schema.Layout) -> World:
        """The same ranks with this layout; ConfigError if their number does not fit it."""
        refuse_layout(layout, self.size)
        return replace(self, layout=layout, context_group=self._context_group(layout))

    def _context_group(self, layout: schema.Layout) -> dist.ProcessGroup | None:
        """This rank's context group. A collective: every rank creates all groups."""
        if layout.context == 1:
            return None
        apart, together = layout.tensor, layout.context * layout.tensor
        starts = [start + at for start in range(0, self.size, together) for at in range(apart)]
        groups = [dist.new_group(list(range(start, start + together, apart)), timeout=self.timeout) for start in starts]
        own: dist.ProcessGroup = groups[self.rank // together * apart + self.rank % apart]
        return own

    def with_own_group(self, *, timeout_s: float) -> World:
        """The same ranks on a separate group, for a thread beside the loop or for waits longer than the loop's."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sharers(self) -> int:
        """How many consecutive ranks have the same samples: a context group, times the ranks that share its layers."""
        return self.layout.context * self.layout.tensor

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the groups."""
        return self.rank // self.sharers

    @property
    def data_size(self) -> int:
        """Number of shares that the groups are divided into."""
        return self.size // self.sharers

    @property
    def reports_samples(self) -> bool:
        """Whether this rank reports for the ranks with the same samples."""
        return self.rank % self.sharers == 0

    @property
    def addends(self) -> int:
        """Number of ranks whose gradients of a weight add up to the step's.

        Ranks that share layers have equal gradients of undivided weights, and otherwise those of their own part.
        """
        return self.size // self.layout.tensor

    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks to shard a model over: (replicas, shards) with several replicas, else (shards,).

        Exists for a single rank too, for what FSDP does besides sharding.
        """
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not exported
            dist.init_process_group(_backend(self.device), store=store, rank=0, world_size=1)
        replicas = self.layout.replicas
        if replicas == 1:
            return init_device_mesh(self.device.type, (self.size,))
        return self._mesh({"replicas": replicas, "shards": self.size // replicas})

    def expert_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """(ranks that hold the same experts, to shard them over; consecutive ranks, to divide experts among)"""
        return self._meshes("experts", self.layout.experts)

    def tensor_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """(ranks that hold the same part of each layer, to shard it over; consecutive ranks, to divide layers among)"""
        return self._meshes("tensor", self.layout.tensor)

    def _meshes(self, name: str, parts: int) -> tuple[DeviceMesh, DeviceMesh]:
        replicas = self.layout.replicas
        dimensions = {"holders": self.size // replicas // parts, name: parts}
        if replicas > 1:
            dimensions = {"replicas": replicas, **dimensions}
        mesh = self._mesh(dimensions)
        return mesh["holders"] if replicas == 1 else mesh["replicas", "holders"], mesh[name]

    def _mesh(self, dimensions: Mapping[str, int]) -> DeviceMesh:
        key = tuple(dimensions.items())
        if key not in self.meshes:
            names, sizes = tuple(dimensions), tuple(dimensions.values())
            self.meshes[key] = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return self.meshes[key]

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
        """The sum of per-sample statistics, counting each sample once."""
        return self.total(values if self.reports_samples else np.zeros_like(values))

    def largest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def all_agree(self, agrees: bool) -> bool:
        return bool(self.largest(np.array([0.0 if agrees else 1.0]))[0] == 0.0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in the order of ranks, on all ranks."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        longest = max(int(n) for n in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _to_tensor(data)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]

    def _reduce(self, values: npt.NDArray[np.float64], op: dist.ReduceOp.RedOpType) -> npt.NDArray[np.float64]:
        if self.size == 1:
            return values
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor.numpy()


@contextmanager
def join_world(environment: Mapping[str, str], *, timeout_s: float, gpu_memory: float | None = None) -> Iterator[World]:
    """The world that torchrun's variables describe; without them, a world of one.

    `gpu_memory`: the share of its GPU's memory that this rank may use, so that it, and not the process it shares the
    GPU with, runs out of memory. No GPU has run this.

    A rank that fails among GPUs leaves its groups open: NCCL's shutdown waits for all ranks, and the others are in the
    middle of something else, so the reason would never be told. See `end_if_joined`.
    """
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
        local_size = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        yield World(rank=rank, size=size, device=device, timeout=timedelta(seconds=timeout_s), local_size=local_size)
    except BaseException:
        if size == 1 or device.type != "cuda":
            _leave()
        raise
    _leave()


def end_if_joined(code: int, error: Exception | None = None) -> None:
    """End this process at once, with the error's traceback, if it has left groups open: its normal end would wait for
    NCCL too. What becomes of the other ranks: see `failing`. No GPU has run this."""
    if dist.is_initialized():
        if error is not None:
            traceback.print_exception(error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def die_with_parent(parent: int) -> None:
    """End this rank at once when torchrun's agent (`parent`, as seen at the start) ends, even by kill -9.

    Otherwise orphaned ranks keep training (measured), beside their replacements.
    """
    process.die_with_parent()
    if os.getppid() != parent:  # it died before the line above took effect
        raise TrainingError("the process that started this rank has ended")


def show_rank(rank: str) -> None:
    """Name the process after its rank in `ps` and `top`."""
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(f"rank-{rank}")
