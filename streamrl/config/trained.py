"""Checks for contradictions among settings of the model: activations for the backward pass, adapters, and the routers
of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config.explain import Problem
from streamrl.config.schema import Config


def check_adapters(config: Config) -> Iterator[Problem]:
    """Check the dtypes: workers read the frozen model from its own files, and compare it with the learner's."""
    if config.model.lora is not None and (config.model.dtype, config.weights.dtype) == ("bfloat16", "float32"):
        remedy = "the learner holds the frozen model in bfloat16, so workers' float32 copy would differ; set bfloat16"
        yield Problem(key="weights.dtype", remedy=f"{remedy}, or model.dtype=float32")


def check_activations(config: Config) -> Iterator[Problem]:
    if config.model.activations == "cpu" and config.model.gradient_checkpointing is False:
        remedy = "only gradient checkpointing's inputs can be offloaded; set model.gradient_checkpointing: auto"
        yield Problem(key="model.activations", remedy=remedy)


def check_compile(config: Config) -> Iterator[Problem]:
    if config.model.compile is not True:
        return
    for key in layers_apart(config):
        remedy = f"only whole layers without adapters can be compiled, and {key} is set; set it to false"
        yield Problem(key="model.compile", remedy=remedy)


def layers_apart(config: Config) -> Iterator[str]:
    """The settings by which a rank's layers are not whole, or have adapters."""
    layout = config.learner.layout
    yield from (f"learner.layout.{name}" for name in ("context", "tensor", "experts") if getattr(layout, name) > 1)
    if config.model.lora is not None:
        yield "model.lora"


def check_routers(config: Config) -> Iterator[Problem]:
    model = config.model
    why = "with model.router = frozen" if model.router == "frozen" else "with model.lora" if model.lora else None
    for name in ("router_balance", "router_z") if why else ():
        if getattr(model, name):
            yield Problem(key=f"model.{name}", remedy=f"must be 0 {why}: no router is trained")
