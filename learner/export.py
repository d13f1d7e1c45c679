"""The trained model as a folder that plain transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import torch

from learner.distributed import World
from learner.lora import merged_parameters
from learner.model import Policy, load_model
from learner.tensors import whole
from streamrl.config import schema


class Tokenizer(Protocol):
    def save_pretrained(self, folder: Path, /) -> object: ...


def export(policy: Policy, tokenizer: Tokenizer, config: schema.Config, world: World) -> Path:
    """Config, tokenizer and merged weights in `weights.dtype`; all ranks take part, rank 0 writes.

    The folder appears whole: it is written beside and renamed.
    """
    folder = config.folder / "export"
    dtype = getattr(torch, config.weights.dtype)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in merged_parameters(policy.model):
        tensor = whole(parameter)
        if world.is_main:
            weights[name] = tensor.to(device="cpu", dtype=dtype, copy=True)
    if world.is_main:
        temporary = folder.with_name("export.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        # A fresh model of the same kind knows its ties and its file layout; ours is sharded and may carry adapters.
        model = load_model(config.model.path).to(dtype)
        missing = set(weights) ^ {name for name, _ in model.named_parameters()}
        assert not missing, f"names of the trained and of the original model differ: {sorted(missing)}"
        model.load_state_dict(weights, strict=False)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    world.barrier()
    return folder
