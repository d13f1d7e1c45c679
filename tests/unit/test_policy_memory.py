"""What a forward pass leaves in memory: with checkpointing, no layer's weights in bf16 beyond the layer."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.learner.model.load import load_policy
from streamrl.learner.model.packing import empty_micro_batch
from streamrl.learner.model.ways import decoder_of
from streamrl.learner.process.ranks import World
from tests.learner_cases import learner_config
from tests.tiny_models import make_model

LAYERS = 4


class Casts(TorchDispatchMode):
    """Copies in bf16 of what is as large as a matrix of the model, while they live."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._shapes = {p.shape for p in model.parameters() if p.ndim == 2}
        self.live: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and out.shape in self._shapes:
            self.live.add(out.untyped_storage())
        return out


def test_casts_of_weights_end_with_their_layer(tmp_path: Path) -> None:
    """Under FSDP each rank would end with the whole model in bf16: 62 GB of a model of 32B."""
    folder = make_model(tmp_path / "model", layers=LAYERS)
    config = learner_config(folder, model={"path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": True})
    policy = load_policy(config, World(rank=0, size=1, device=torch.device("cpu")), (1,))
    casts, alive = Casts(policy), list[int]()
    for layer in decoder_of(policy.model).layers:
        layer.register_forward_hook(lambda *_: alive.append(len(casts.live)))
    with casts:
        policy(empty_micro_batch())
    assert len(alive) == LAYERS
    assert alive == [0] * LAYERS
