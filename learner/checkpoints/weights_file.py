"""The weights of a checkpoint as workers are served them: one safetensors file, adapters merged, in `weights.dtype`."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
import transformers

from learner.checkpoints.checkpoint import Checkpoint
from learner.checkpoints.state import load_state
from learner.distributed import World
from learner.policy.lora import merged_parameters
from learner.policy.model import load_policy, read_speech
from learner.policy.optim import make_optimizer
from learner.policy.pretrained import load_model
from streamrl.config import schema


def write_weights(config: schema.Config, path: Path, *, checkpoint: Checkpoint | None) -> None:
    """Those of the checkpoint; without one, those of `model.path`. In one process and in memory."""
    transformers.utils.logging.disable_progress_bar()  # whoever waits for this draws its own
    if checkpoint is None:
        model: torch.nn.Module = load_model(config.model.path)
    else:
        world = World(rank=0, size=1, device=torch.device("cpu"))
        policy = load_policy(config, world, read_speech(config.model.path).end_ids)
        load_state(checkpoint.folder, policy, make_optimizer(policy, config.optimizer), world)
        model = policy.model
    dtype = getattr(torch, config.weights.dtype)
    with torch.no_grad():
        tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in merged_parameters(model)}
    safetensors.torch.save_file(tensors, path)
