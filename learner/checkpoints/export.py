"""The trained model as a folder that plain transformers loads, and its adapters as one that peft loads.

The weights of a checkpoint as workers are served them: one safetensors file, adapters merged, in `weights.dtype`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
import transformers
from torch import nn

from streamrl.config import schema
from streamrl.files import replace_folder
from streamrl.learner.checkpoints.checkpoint import Checkpoint
from streamrl.learner.checkpoints.shard import load_state
from streamrl.learner.model.load import begin_model, load_model, load_policy, read_tokenizer_info
from streamrl.learner.model.lora import adapter_parameters, merged_parameters, save_adapters
from streamrl.learner.model.optimizer import make_optimizer
from streamrl.learner.model.policy import Policy
from streamrl.learner.model.tensors import whole
from streamrl.learner.model.ways import MASKED
from streamrl.learner.process.ranks import World

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
    weights = _gathered(merged_parameters(policy.model, dtype), dtype, world)
    adapters = _gathered(adapter_parameters(policy.model), torch.float32, world)
    if world.is_main:
        temporary = folder.with_name("export.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        # A fresh model of the same kind knows its ties and its file layout; ours is sharded and may carry adapters.
        model, unread = begin_model(config.model.path, attention=MASKED, device=torch.device("cpu"))
        nn.Module.to(model, dtype)
        missing = set(weights) ^ {name for name, _ in model.named_parameters()}
        assert not missing, f"names of the trained and of the original model differ: {sorted(missing)}"
        if unread:
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


def write_model(config: schema.Config, folder: Path, *, checkpoint: Checkpoint) -> Path:
    """The checkpoint as `export` writes a run's last one, in one process; somewhere in this folder."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
    policy, world = _restored(config, checkpoint)
    return export(policy, tokenizer, config.model_copy(update={"dir": folder}), world)


def write_weights(config: schema.Config, path: Path, *, checkpoint: Checkpoint | None) -> None:
    """Those of the checkpoint; without one, those of `model.path`. In one process and in memory."""
    transformers.utils.logging.disable_progress_bar()  # whoever waits for this draws its own
    if checkpoint is None:
        model: torch.nn.Module = load_model(config.model.path)
    else:
        model = _restored(config, checkpoint)[0].model
    dtype = getattr(torch, config.weights.dtype)
    with torch.no_grad():
        tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in merged_parameters(model, dtype)}
    safetensors.torch.save_file(tensors, path)


def _restored(config: schema.Config, checkpoint: Checkpoint) -> tuple[Policy, World]:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    policy = load_policy(config, world, read_tokenizer_info(config.model.path).end_ids)
    load_state(checkpoint.folder, policy, make_optimizer(policy, config.optimizer), world)
    return policy, world
