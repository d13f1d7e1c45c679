"""What one rank holds of each tensor, in coordinates of the whole tensor laid flat.

FSDP cuts tensors along their first dimension, so a rank holds one run of the flat tensor. Publishing and checkpoints
speak of such runs only: neither gathers anything, and neither depends on how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows:
    start: int
    values: torch.Tensor  # [length] flat; shares memory with the parameter


def held(tensor: torch.Tensor, *, shape: torch.Size) -> LocalRows:
    """This rank's run of a parameter of this whole shape, or of an optimizer's state for it."""
    assert tensor.shape == shape
    first, rows = held_rows(tensor)
    return LocalRows(start=first * (shape.numel() // shape[0]) if first else 0, values=rows.view(-1))


def held_rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """(the first, this rank's rows of the first dimension, which share memory with the tensor)"""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach()
    local = tensor.to_local().detach()
    mesh = tensor.device_mesh
    size = -(-len(tensor) // mesh.size())  # all ranks but the last ones hold so many
    first = min(mesh.get_local_rank() * size, len(tensor))
    assert len(local) == min(size, len(tensor) - first), "shards are equal runs of the first dimension"
    return first, local


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on every rank; a collective when it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
