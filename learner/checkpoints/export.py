"""Writes the trained model as a folder that plain transformers loads, and its adapters as one that peft loads.

The weights are those that workers serve: safetensors files with the hub's tensor names, adapters merged, in
`weights.dtype`. One parameter at a time is gathered, on rank 0's host (`hub_files`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
import transformers
from transformers.utils.hub import cached_file

from streamrl.config import schema
from streamrl.files import replace_folder
from streamrl.learner.checkpoints.checkpoint import Checkpoint
from streamrl.learner.checkpoints.hub_files import HubFiles
from streamrl.learner.checkpoints.shard import load_weights
from streamrl.learner.loading.build import build_model, load_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.model.compiled import with_layers
from streamrl.learner.model.lora import adapter_parameters, base_name, merged_parameters, save_adapters
from streamrl.learner.model.policy import Policy
from streamrl.learner.packing.attention import MASKED
from streamrl.learner.parallel.dtensors import persistent_buffers, whole
from streamrl.learner.process.ranks import World

ADAPTER = "adapter"  # folder within the export
_PROCESSOR = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",  # older processors' own
)
# How far the ranks may gather ahead of rank 0's writing. On GPUs nothing else limits it: a gather waits in its stream,
# where NCCL aborts it after a step's timeout, not a disk's. No GPU has run this.
_MAX_AHEAD_BYTES = 1 << 30
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class Tokenizer(Protocol):
    def save_pretrained(self, folder: Path, /) -> object: ...


def export(policy: Policy, tokenizer: Tokenizer, config: schema.Config, world: World) -> Path:
    """Write config, tokenizer and merged weights in `weights.dtype`; trained adapters also separately, in fp32.

    All ranks take part, rank 0 writes. The folder is written under a temporary name and renamed, so it appears
    complete; an older export stays until then.
    """
    folder = config.folder / "export"
    dtype: torch.dtype = getattr(torch, config.weights.dtype)
    temporary = folder.with_name("export.tmp")
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
    _write_weights(policy, temporary, config.model.path, dtype, world)
    adapters = _gathered(adapter_parameters(policy.model), world)
    if world.is_main:
        tokenizer.save_pretrained(temporary)
        if policy.model.config.get_text_config() is not policy.model.config:
            _copy_processor(config.model.path, temporary)
        if config.model.lora is not None:
            lora, base = config.model.lora, config.model.path
            save_adapters(adapters, lora, temporary / ADAPTER, model=policy.model, base=base)
        replace_folder(temporary, folder)
    world.barrier()
    return folder


def _copy_processor(path: str, folder: Path) -> None:
    """Copy what a model that reads more than text has beside its tokenizer; vLLM does not serve it without."""
    for name in _PROCESSOR:
        found = cached_file(
            path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if found is not None:
            shutil.copyfile(found, folder / name)


@torch.no_grad()
def _write_weights(policy: Policy, folder: Path, path: str, dtype: torch.dtype, world: World) -> None:
    """Gather and write one tensor at a time, in this dtype. A collective."""
    with ExitStack() as stack:
        files: HubFiles | None = None
        if world.is_main:
            # A fresh model of this class defines ties and file layout; the trained one is sharded and may have
            # adapters.
            files = stack.enter_context(HubFiles(folder, build_model(path, MASKED), dtype))
        ahead = 0
        for name, parameter in merged_parameters(policy.model, dtype):
            tensor = whole(parameter.detach().to(dtype))
            if files is not None:
                files.take(name, tensor.cpu())
            if (ahead := ahead + tensor.nbytes) >= _MAX_AHEAD_BYTES:
                world.barrier()
                ahead = 0
        for name, buffer in persistent_buffers(policy.model):
            if files is not None:
                files.take(base_name(name), buffer.cpu())


def _gathered(parameters: Iterable[tuple[str, torch.Tensor]], world: World) -> dict[str, torch.Tensor]:
    """The parameters, gathered on rank 0's host. A collective."""
    found = {}
    for name, parameter in parameters:
        tensor = whole(parameter)
        if world.is_main:
            found[name] = tensor.to(device="cpu", dtype=torch.float32, copy=True)
    return found


def write_model(config: schema.Config, folder: Path, *, checkpoint: Checkpoint) -> Path:
    """Write the checkpoint into this folder, as `export` writes a run's last one; in one process."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = read_tokenizer_info(config.model.path).tokenizer
    policy = _restored(config, checkpoint)
    return export(policy, tokenizer, config.model_copy(update={"dir": folder}), ALONE)


def write_weights(config: schema.Config, path: Path, *, checkpoint: Checkpoint | None) -> None:
    """Write the checkpoint's weights, or those of `model.path` without one; in one process and in memory."""
    transformers.utils.logging.disable_progress_bar()  # the caller draws its own
    if checkpoint is None:
        model: torch.nn.Module = load_model(config.model.path)
    else:
        model = _restored(config, checkpoint).model
    dtype = getattr(torch, config.weights.dtype)
    with torch.no_grad():
        tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in merged_parameters(model, dtype)}
        tensors |= {base_name(name): buffer.float() for name, buffer in persistent_buffers(model)}  # as publishing does
    safetensors.torch.save_file(tensors, path)


def _restored(config: schema.Config, checkpoint: Checkpoint) -> Policy:
    config = with_layers(config, compiled=False)  # for a pass or none; and a compiler may be missing here
    policy = load_policy(config, ALONE, read_tokenizer_info(config.model.path).end_ids)
    load_weights(checkpoint.folder, policy)
    return policy
