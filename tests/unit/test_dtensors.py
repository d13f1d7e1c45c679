"""Rows on the host stay there although the mesh is of GPUs: FSDP requires it of parameters that it offloads."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from streamrl.learner.parallel.dtensors import empty_like, with_rows

SHAPE = torch.Size([8, 3])


def sharded_over_gpus() -> DTensor:
    """As FSDP leaves a parameter that has no memory yet, on the second of two ranks. There is no GPU here: whatever is
    moved to one raises."""
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=1)
    rows = torch.empty(4, 3, device="meta")
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=SHAPE, stride=(3, 1), run_check=False)


def test_memory_on_the_host_is_on_the_host_though_the_mesh_is_of_gpus() -> None:
    made = empty_like(sharded_over_gpus(), torch.device("cpu"))
    assert isinstance(made, DTensor)
    assert made.device == made.to_local().device == torch.device("cpu")
    assert (made.shape, made.device_mesh.device_type, made.placements) == (SHAPE, "cuda", (Shard(0),))
    assert made.to_local().shape == (4, 3)


def test_rows_of_another_tensor_are_shared_and_not_copied() -> None:
    rows = torch.arange(12.0).view(4, 3)
    made = with_rows(sharded_over_gpus(), rows)
    assert made.device == torch.device("cpu")
    assert (made.shape, made.placements) == (SHAPE, (Shard(0),))
    assert made.to_local().data_ptr() == rows.data_ptr()
