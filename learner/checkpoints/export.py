"""The trained model as a folder that plain transformers loads, and its adapters as one that peft loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from learner.distributed import World
from learner.policy.attention import MASKED
from learner.policy.lora import adapter_parameters, merged_parameters, save_adapters
from learner.policy.policy import Policy
from learner.policy.pretrained import begin_model
from learner.policy.tensors import whole
from streamrl.config import schema
from streamrl.durable import replace_folder

ADAPTER = "adapter"  # folder within the export


class Tokenizer(Protocol):
    def save_pretrained(self, folder: Path, /) -> object: ...


def export(policy: Policy, tokenizer: Tokenizer, config: schema.Config, world: World) -> Path:
    """Config, tokenizer and merged weights in `weights.dtype`; where adapters were trained, these too, in fp32 and by
    themselves. All ranks take part, rank 0 writes.

    The folder appears whole, and an older one is there until then: it is written beside and renamed.
    """
    folder = config.folder / "export"
    dtype: torch.dtype = getattr(torch, config.weights.dtype)
    weights = _gathered(merged_parameters(policy.model), dtype, world)
    adapters = _gathered(adapter_parameters(policy.model), torch.float32, world)
    if world.is_main:
        temporary = folder.with_name("export.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        # A fresh model of the same kind knows its ties and its file layout; ours is sharded and may carry adapters.
        model, unread = begin_model(config.model.path, attention=MASKED, device=torch.device("cpu"))
        nn.Module.to(model, dtype)
        missing = set(weights) ^ {name for name, _ in model.named_parameters()}
        assert not missing, f"names of the trained and of the original model differ: {sorted(missing)}"
        if unread.sources:
            model.save_pretrained(temporary, state_dict=weights)
        else:
            model.load_state_dict(weights, strict=False)
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if config.model.lora is not None:
            save_adapters(adapters, config.model.lora, temporary / ADAPTER, base=config.model.path)
        replace_folder(temporary, folder)
    world.barrier()
    return folder


def _gathered(
    parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, world: World
) -> dict[str, torch.Tensor]:
    """On rank 0's host; a collective."""
    found = {}
    for name, parameter in parameters:
        tensor = whole(parameter)
        if world.is_main:
            found[name] = tensor.to(device="cpu", dtype=dtype, copy=True)
    return found
