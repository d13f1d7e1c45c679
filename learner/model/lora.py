"""LoRA through peft: adapters train, the base is the reference, and what is published is the two merged.

peft is imported only where adapters are asked for: it is slow to import, and most runs have none.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import transformers
from torch import nn
from torch.utils import swap_tensors

from streamrl.config import schema
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    import peft

_ADAPTER = "default"
_BASE = "base_layer."  # of a parameter's name, where its layer has an adapter


def inject_adapters(model: transformers.PreTrainedModel, settings: schema.Lora, device: torch.device) -> None:
    """The base may still be on `meta`. Adapters begin on the device, with values drawn on the host: all ranks alike."""
    for layer in place_adapters(model, settings).values():
        own = [parameter for name, parameter in layer.named_parameters() if not name.startswith(_BASE)]
        for parameter in own:
            swap_tensors(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu")))
        layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)
        for parameter in own:
            swap_tensors(parameter, nn.Parameter(parameter.detach().to(device)))


def place_adapters(model: transformers.PreTrainedModel, settings: schema.Lora) -> dict[str, Any]:
    """The layers that have one now, without values in it; ConfigError for targets that can have none."""
    import peft  # as the module says

    head = getattr(model.get_output_embeddings(), "weight", None)
    for name, module in model.named_modules():
        if name.endswith(settings.targets) and head is not None and getattr(module, "weight", None) is head:
            raise ConfigError(f"model.lora.targets: {name} is the output projection or tied to it; leave it out")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # which it sets right by itself
            peft.inject_adapter_in_model(_as_peft_says(settings), model, adapter_name=_ADAPTER)
    except ValueError as error:
        targets = ", ".join(settings.targets)
        if any(name.endswith(settings.targets) for name, _ in model.named_modules()):
            raise ConfigError(f"model.lora.targets: {targets}: {str(error).splitlines()[0]}") from error
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        remedy = f"; it has {', '.join(sorted(linear))}" if linear else ""
        raise ConfigError(f"model.lora.targets: no layer of the model is called any of {targets}{remedy}") from error
    adapted = _adapted(model)
    for name, layer in adapted.items():
        if isinstance(layer, peft.tuners.lora.ParamWrapper):
            raise ConfigError(
                f"model.lora.targets: {name} is experts in one parameter, which have no adapters; name others"
            )
    return adapted


def _as_peft_says(settings: schema.Lora, *, base: str | None = None) -> peft.LoraConfig:
    """`base`: the model that the adapters are for, where they are to be loaded without it."""
    import peft

    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a factor: peft takes any number, and says whole ones
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        bias="none",
        base_model_name_or_path=base,
        task_type=None if base is None else "CAUSAL_LM",
    )


def base_name(name: str) -> str:
    """What the parameter is called in the model without adapters."""
    return name.replace(f".{_BASE}", ".")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: the policy as it was before the run."""
    layers = list(_adapted(model).values())
    for layer in layers:
        own = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        layer.enable_adapters(enabled=False)
        for parameter in own:
            parameter.requires_grad_(True)  # peft takes that away, and FSDP asks for it once, in its first pass
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


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(the name in peft's own files, the adapter's weight); nothing for a model without adapters."""
    adapted = _adapted(model)
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{owner}.lora_") for owner in adapted):
            yield f"base_model.model.{name.replace(f'.{_ADAPTER}', '')}", parameter


def save_adapters(weights: Mapping[str, torch.Tensor], settings: schema.Lora, folder: Path, *, base: str) -> None:
    """As peft loads them onto the base: `PeftModel.from_pretrained(model, folder)`."""
    _as_peft_says(settings, base=base).save_pretrained(str(folder))
    safetensors.torch.save_file(dict(weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
