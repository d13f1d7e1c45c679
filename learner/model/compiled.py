"""A model's decoder layers, compiled by torch (`model.compile`): fewer and larger kernels between products of matrices.

    weights gathered (FSDP) ─► inputs kept, to compute again ─► the layer's hooks ─► its forward pass, compiled
                                                                                      and the backward pass of that

What stands before the last is as it was, and so are the names of weights. Layers of one kind have the code that the
first of them was compiled to, for rows of any shape, once for passes that learn and once for those that do not: the
first step waits for it, a minute or so.

Only whole layers: ranks that share them, or have a part of each row, talk to each other in their midst; routers of a
mixture are listened to there, and adapters lie there. No GPU has run this.
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
_COMPILERS = ("g++", "clang++")  # of which torch takes the first


def refuse_compiling(model: transformers.PreTrainedModel) -> None:
    """ConfigError where it has no layers that this is known to be right for, or nothing here compiles them."""
    kind = type(model).__name__
    if not any(True for _ in layers_of(model)):
        raise ConfigError(f"{KEY} = true: transformers names no layers of {kind}; set it to false")
    if any(True for _ in experts_of(model)):
        raise ConfigError(f"{KEY} = true: {kind} is a mixture of experts, which are not compiled; set it to false")
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        told = f"torch needs a C++ compiler for it, and there is no {' or '.join(wanted)} on PATH"
        raise ConfigError(f"{KEY} = true: {told}; install one, or set it to false")


def compile_layers(model: transformers.PreTrainedModel) -> None:
    """From now on; each waits for its compiler in the first pass of its kind.

    Where the model stays as it is: the layers of a copy would go on asking those of this one.
    """
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)
