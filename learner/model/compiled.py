"""Compiles a model's decoder layers with torch (`model.compile`): fewer and larger kernels between matrix products.

    weights gathered (FSDP) ─► activation checkpointing ─► the layer's hooks ─► its forward pass, compiled
                                                                                and the backward pass of that

Only the last is changed; the names of weights stay as they are. Layers of one kind share the code compiled for the
first of them, for rows of any shape, once with and once without gradients: the first step waits for it, a minute or so.

Only whole layers can be compiled. Ranks that split layers or rows communicate inside them, routers of a mixture are
observed there, and adapters lie there. No GPU has run this.
"""

from __future__ import annotations

import os
import shutil

import torch
import transformers

from streamrl.errors import ConfigError
from streamrl.learner.parallel.experts import experts_of
from streamrl.learner.parallel.fsdp import layers_of

KEY = "model.compile"
_COMPILERS = ("g++", "clang++")  # torch takes the first of them


def refuse_compiling(model: transformers.PreTrainedModel) -> None:
    """Raise ConfigError if the model's layers are not known to compile correctly, or no compiler is installed."""
    kind = type(model).__name__
    if not any(True for _ in layers_of(model)):
        raise ConfigError(f"{KEY} = true: transformers does not name the layers of {kind}; set it to false")
    if any(True for _ in experts_of(model)):
        raise ConfigError(f"{KEY} = true: {kind} is a mixture of experts, which cannot be compiled; set it to false")
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        problem = f"torch needs a C++ compiler, and there is no {' or '.join(wanted)} on PATH"
        raise ConfigError(f"{KEY} = true: {problem}; install one, or set it to false")


def compile_layers(model: transformers.PreTrainedModel) -> None:
    """Compile every layer; each kind waits for its compiler in the first pass.

    Copy the model before, not after: the layers of a copy would call those of this one.
    """
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)
