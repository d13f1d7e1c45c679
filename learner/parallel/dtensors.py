"""What one rank holds of each tensor, in coordinates of the flattened whole tensor.

FSDP cuts tensors along their first dimension, and so do expert and tensor parallelism before it, so a rank holds one
run of the flat tensor. Publishing and checkpoints work on such runs: neither gathers anything, and neither depends on
the number of ranks. Of several replicas, the first reports what all hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows:
    start: int
    values: torch.Tensor  # [length] flat; shares memory with the parameter


def held(tensor: torch.Tensor, *, shape: torch.Size) -> LocalRows:
    """This rank's run of a parameter of this whole shape, or of its optimizer state."""
    assert tensor.shape == shape
    first, rows = held_rows(tensor)
    return LocalRows(start=first * (shape.numel() // shape[0]) if first else 0, values=rows.view(-1))


def reported(tensor: torch.Tensor, *, shape: torch.Size) -> LocalRows:
    """The run that this rank reports: what it holds, or nothing if another replica reports it."""
    run = held(tensor, shape=shape)
    return LocalRows(start=run.start, values=run.values[:0]) if is_copy(tensor) else run


def is_copy(tensor: torch.Tensor) -> bool:
    """Whether another replica reports this rank's rows."""
    if not isinstance(tensor, DTensor):
        return False
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank is not on the tensor's mesh"
    return any(isinstance(kind, Replicate) and at > 0 for kind, at in zip(tensor.placements, place, strict=True))


def held_rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(index of the first, this rank's rows of the first dimension, sharing memory with the tensor)"""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    local, first, num = tensor.to_local().detach(), 0, len(tensor)
    for over in _cuts(tensor):
        size = -(-num // tensor.device_mesh.size(over))  # held by all ranks but the last ones
        begin = min(tensor.device_mesh.get_local_rank(over) * size, num)
        first, num = first + begin, min(size, num - begin)
    assert len(local) == num, "shards are equal runs of the first dimension"
    return first, local


def _cuts(tensor: DTensor) -> list[int]:
    """The mesh dimensions that cut the tensor, in the order of the cuts.

    FSDP cuts after expert parallelism, whose mesh dimension is further back.
    """
    kinds = {number: kind for number, kind in enumerate(tensor.placements) if not isinstance(kind, Replicate)}
    return sorted(kinds, key=lambda number: isinstance(kinds[number], _StridedShard))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's persistent buffers, which its files hold besides parameters."""
    for owner, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{owner}.{leaf}" if owner else leaf, buffer


def part_of(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a whole tensor, on a mesh whose ranks have equally many."""
    num = len(tensor) // mesh.size()
    first = mesh.get_local_rank() * num
    rows = tensor.detach()[first : first + num].clone()
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard, differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for what this rank holds of the tensor."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return with_rows(tensor, torch.empty_like(tensor.to_local(), device=device))


def with_rows(tensor: DTensor, rows: torch.Tensor) -> DTensor:
    """A DTensor like this one, with these rows as its local part, on whatever device they are.

    `DTensor.from_local` would move them to the mesh's device type; rows that FSDP offloads must stay on the host.
    """
    assert rows.dtype == tensor.dtype, "the dtype is part of the spec that both share"
    return DTensor(rows, tensor._spec, requires_grad=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank; a collective if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
