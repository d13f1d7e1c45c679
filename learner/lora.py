"""LoRA through peft: adapters train, the base is the reference, and what is published is the two merged.

peft is imported only where adapters are asked for: it is slow to import, and most runs have none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from streamrl.config import schema
from streamrl.errors import ConfigError

_ADAPTER = "default"


def inject_adapters(model: nn.Module, settings: schema.Lora) -> None:
    import peft  # as the module says

    adapters = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        bias="none",
    )
    try:
        peft.inject_adapter_in_model(adapters, model, adapter_name=_ADAPTER)
    except ValueError as error:
        targets = ", ".join(settings.targets)
        raise ConfigError(f"model.lora.targets: no layer of the model is called any of {targets}") from error


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: the policy as it was before the run."""
    layers = list(_adapted(model).values())
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(the base's own name, base + adapter) for every parameter; a model without adapters gives its own."""
    adapted = _adapted(model)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in adapted:
            delta = adapted[owner].get_delta_weight(_ADAPTER) if leaf == "weight" else None
            yield f"{owner}.{leaf}", parameter if delta is None else parameter + delta
        elif not any(name.startswith(f"{owner}.lora_") for owner in adapted):
            yield name, parameter


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
