"""Compiles a model's decoder layers with torch (`model.compile`): fewer and larger kernels between matrix products.

    weights gathered (FSDP) ─► activation checkpointing ─► the layer's hooks ─► its forward pass, compiled
                                                                                and the backward pass of that

Only the last is changed; the names of weights stay as they are. Layers of one kind share the code compiled for the
first of them, for rows of any shape, once with and once without gradients: the first step waits for it, a minute or so.

Only whole layers can be compiled. Ranks that split layers or rows communicate inside them, routers of a mixture are
observed there, and adapters lie there. `auto` compiles on GPUs what can be: on an H100 a step of a 1.5B model took 0.86
of the time, or 0.69 with what it saves of activations.
"""

from __future__ import annotations

import os
import shutil

import structlog
import torch
import transformers

from streamrl.config import schema
from streamrl.config.trained import layers_apart
from streamrl.errors import ConfigError
from streamrl.learner.parallel.experts import experts_of
from streamrl.learner.parallel.fsdp import layers_of

KEY = "model.compile"
_COMPILERS = ("g++", "clang++")  # torch takes the first of them

log = structlog.get_logger(__name__)


def compiles(config: schema.Config, model: transformers.PreTrainedModel, device: torch.device) -> bool:
    """Whether this run compiles the model's layers; ConfigError if it must and cannot."""
    if config.model.compile is True:
        refuse_compiling(model)
        return True
    if config.model.compile is False or device.type != "cuda" or config.model.dtype != "bfloat16":
        return False
    if any(True for _ in layers_apart(config)):
        return False
    if (obstacle := _obstacle(model)) is not None:
        log.info("layers are not compiled", setting=f"{KEY}: auto", reason=obstacle)
        return False
    return True


def refuse_compiling(model: transformers.PreTrainedModel) -> None:
    """Raise ConfigError if the model's layers are not known to compile correctly, or no compiler is installed."""
    if (obstacle := _obstacle(model)) is not None:
        raise ConfigError(f"{KEY} = true: {obstacle}, or set it to false")


def _obstacle(model: transformers.PreTrainedModel) -> str | None:
    kind = type(model).__name__
    if not any(True for _ in layers_of(model)):
        return f"transformers does not name the layers of {kind}; train another model"
    if any(True for _ in experts_of(model)):
        return f"{kind} is a mixture of experts, which cannot be compiled; train a dense model"
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        return f"torch needs a C++ compiler, and there is no {' or '.join(wanted)} on PATH; install one"
    return None


def compile_layers(model: transformers.PreTrainedModel, *, or_go_on: bool) -> None:
    """Compile every layer; each kind waits for its compiler in the first pass.

    `or_go_on`: a layer that fails to compile computes as it is, with a warning; nobody has asked for it to be compiled.
    Copy the model before, not after: the layers of a copy would call those of this one.
    """
    if or_go_on:
        torch._dynamo.config.suppress_errors = True
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)
