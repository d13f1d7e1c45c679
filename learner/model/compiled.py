"""Compiles a model's decoder layers with torch (`model.compile`): fewer and larger kernels between matrix products.

    weights gathered (FSDP) ─► activation checkpointing ─► the layer's hooks ─► its forward pass, compiled
                                                                                and the backward pass of that

Only the last is changed; the names of weights stay as they are. Layers of one kind share the code compiled for the
first of them, for rows of any shape, once with and once without gradients: the first step waits for it, a minute or so.

Only whole layers can be compiled. Ranks that split layers or rows communicate inside them, routers of a mixture are
observed there, and adapters lie there. Recurrences may loop over a row's tokens, and would be compiled for each length.
`auto` compiles on GPUs what can be: on an H100 a step of a 1.5B model took 0.86 of the time, or 0.69 with what it saves
of activations.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import structlog
import torch
import transformers
from torch import nn

from streamrl.config import schema
from streamrl.config.trained import layers_apart
from streamrl.errors import ConfigError
from streamrl.learner.packing.ways import unpackable
from streamrl.learner.parallel.experts import experts_of
from streamrl.learner.parallel.fsdp import layers_of
from streamrl.learner.process.ranks import World

KEY = "model.compile"
_COMPILERS = ("g++", "clang++")  # torch takes the first of them
_NOT_COMPILED = "layers are not compiled"
_KINDS_OF_ROWS = 32  # that a layer is compiled for: with and without gradients, shared prompts, a single cell, ...

log = structlog.get_logger(__name__)


def compiles(config: schema.Config, model: transformers.PreTrainedModel, world: World) -> bool:
    """Whether this rank would compile the model's layers; ConfigError if it must and cannot."""
    if config.model.compile is True:
        refuse_compiling(model)
        return True
    if config.model.compile is False or world.device.type != "cuda" or config.model.dtype != "bfloat16":
        return False
    if any(True for _ in layers_apart(config)):
        return False
    if (obstacle := _obstacle(model)) is not None:
        if world.rank % world.local_size == 0:  # on each host: a compiler may be missing on some only
            log.info(_NOT_COMPILED, setting=f"{KEY}: auto", reason=obstacle)
        return False
    return True


def all_compile(config: schema.Config, world: World) -> bool:
    """Whether all ranks would compile, by what each has found (`compiles`). A collective."""
    would = config.model.compile is True
    do = world.all_agree(would)
    if would and not do and world.is_main:
        log.info(_NOT_COMPILED, setting=f"{KEY}: auto", reason="a rank on another host cannot; its log says why")
    return do


def with_layers(config: schema.Config, *, compiled: bool) -> schema.Config:
    """The configuration with what `auto` leaves open decided."""
    return config.model_copy(update={"model": config.model.model_copy(update={"compile": compiled})})


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
    if unfit := unpackable(model.config):
        return f"layers of {kind} may depend on more than attention ({', '.join(unfit[:3])}); train another model"
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        return f"torch needs a C++ compiler, and there is no {' or '.join(wanted)} on PATH; install one"
    return None


def compile_layers(model: transformers.PreTrainedModel, *, or_go_on: bool) -> None:
    """Compile every layer; each kind waits for its compiler in the first pass.

    `or_go_on`: a layer that fails to compile computes as it is, with a warning; nobody has asked for it to be compiled.
    Copy the model before, not after: the layers of a copy would call those of this one.
    """
    from torch._dynamo import config as dynamo  # takes a second
    from torch._functorch import config as functorch

    dynamo.recompile_limit = max(dynamo.recompile_limit, _KINDS_OF_ROWS)
    functorch.force_non_lazy_backward_lowering = True  # what cannot be compiled is known before it runs
    for layer in layers_of(model):
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = _or_plain(layer, compiled) if or_go_on else compiled


def _or_plain(layer: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Call `compiled`; from its first failure on, what it was compiled from."""
    from torch._dynamo.exc import TorchDynamoException

    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            log.warning("a layer is not compiled", setting=f"{KEY}: auto", reason=reason)
            layer.forward = plain
            return plain(*args, **kwargs)

    return forward
