"""What one rank holds of each tensor, in coordinates of the whole tensor laid flat.

FSDP cuts tensors along their first dimension, and so are experts cut over their ranks before, and what ranks share of
a layer: a rank holds one run of the flat tensor. Publishing and checkpoints speak of such runs only: neither gathers
anything, and neither depends on how many ranks there are. Of several replicas, the first one tells of what all hold.
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
    """This rank's run of a parameter of this whole shape, or of an optimizer's state for it."""
    assert tensor.shape == shape
    first, rows = held_rows(tensor)
    return LocalRows(start=first * (shape.numel() // shape[0]) if first else 0, values=rows.view(-1))


def told(tensor: torch.Tensor, *, shape: torch.Size) -> LocalRows:
    """What of it this rank has to tell others: what it holds, or nothing, of a copy."""
    run = held(tensor, shape=shape)
    return LocalRows(start=run.start, values=run.values[:0]) if is_copy(tensor) else run


def is_copy(tensor: torch.Tensor) -> bool:
    """Whether a rank of another replica tells of this rank's rows."""
    if not isinstance(tensor, DTensor):
        return False
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "a rank has no tensor of a mesh that it is not on"
    return any(isinstance(kind, Replicate) and at > 0 for kind, at in zip(tensor.placements, place, strict=True))


def held_rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(the first, this rank's rows of the first dimension, which share memory with the tensor)"""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    local, first, num = tensor.to_local().detach(), 0, len(tensor)
    for over in _cuts(tensor):
        size = -(-num // tensor.device_mesh.size(over))  # all ranks but the last ones hold so many
        begin = min(tensor.device_mesh.get_local_rank(over) * size, num)
        first, num = first + begin, min(size, num - begin)
    assert len(local) == num, "shards are equal runs of the first dimension"
    return first, local


def _cuts(tensor: DTensor) -> list[int]:
    """The dimensions of its mesh over which it is cut, in the order of the cuts: FSDP's comes after that of experts,
    whose dimension of the mesh is further back."""
    kinds = {number: kind for number, kind in enumerate(tensor.placements) if not isinstance(kind, Replicate)}
    return sorted(kinds, key=lambda number: isinstance(kinds[number], _StridedShard))


def kept_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What the files of a model hold beside its parameters: buffers that nothing computes."""
    for owner, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                yield f"{owner}.{leaf}" if owner else leaf, buffer


def part_of(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The rows of a whole tensor that this rank has of a mesh whose ranks have equally many."""
    num = len(tensor) // mesh.size()
    first = mesh.get_local_rank() * num
    rows = tensor.detach()[first : first + num].clone()
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is here, with the way back for its gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for what this rank holds of it."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    rows = torch.empty_like(tensor.to_local(), device=device)
    return DTensor.from_local(rows, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank; a collective when it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
