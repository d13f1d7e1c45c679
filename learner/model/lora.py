"""LoRA through peft: adapters train, the base is the reference, adapters are published, merged weights are served.

Merging follows the formula of `protocol.weights.format` and gives the same bits wherever it is computed. peft is slow
to import and most runs need none of it, so it is imported only if adapters are configured.
"""

from __future__ import annotations

import re
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
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.learner.packing.ways import decoder_of
from streamrl.learner.parallel.dtensors import held_rows, whole
from streamrl.protocol.weights.adapters import Adapter

if TYPE_CHECKING:
    import peft

_ADAPTER = "default"
_BASE = "base_layer."  # in a parameter's name, if its layer has an adapter
_AT_ONCE = 1 << 20  # elements merged at a time: 8 MB in float64


def inject_adapters(model: transformers.PreTrainedModel, settings: schema.Lora, device: torch.device) -> None:
    """Add adapters; the base may still be on `meta`.

    Adapters live on the device, with initial values drawn on the host, so that all ranks have the same.
    """
    for layer in place_adapters(model, settings).values():
        own = [parameter for name, parameter in layer.named_parameters() if not name.startswith(_BASE)]
        for parameter in own:
            swap_tensors(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu")))
        layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)
        for parameter in own:
            swap_tensors(parameter, nn.Parameter(parameter.detach().to(device)))


def place_adapters(model: transformers.PreTrainedModel, settings: schema.Lora) -> dict[str, Any]:
    """Add uninitialised adapters and return their layers; ConfigError for targets that cannot have any."""
    import peft  # lazily: see the module's docstring

    head = getattr(model.get_output_embeddings(), "weight", None)
    for name, module in model.named_modules():
        if name.endswith(settings.targets) and head is not None and getattr(module, "weight", None) is head:
            raise ConfigError(f"model.lora.targets: {name} is the output projection or tied to it; leave it out")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft corrects this by itself
            peft.inject_adapter_in_model(_as_peft_says(settings, model), model, adapter_name=_ADAPTER)
    except ValueError as error:
        targets = ", ".join(settings.targets)
        if any(name.endswith(settings.targets) for name, _ in model.named_modules()):
            raise ConfigError(f"model.lora.targets: {targets}: {str(error).splitlines()[0]}") from error
        linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        remedy = f"; it has {', '.join(sorted(linear))}" if linear else ""
        raise ConfigError(f"model.lora.targets: no layer of the model is named any of {targets}{remedy}") from error
    adapted = _adapted(model)
    for name, layer in adapted.items():
        if isinstance(layer, peft.tuners.lora.ParamWrapper):
            raise ConfigError(
                f"model.lora.targets: {name} holds stacked experts, which cannot have adapters; name others"
            )
        if layer.get_base_layer().weight.dim() != 2:
            raise ConfigError(
                f"model.lora.targets: {name} is not a matrix and cannot be served with adapters; leave it out"
            )
    return adapted


def _as_peft_says(
    settings: schema.Lora, model: transformers.PreTrainedModel, *, base: str | None = None
) -> peft.LoraConfig:
    """The settings as a peft configuration. `base`: the model path that saved adapters belong to."""
    import peft

    exclude = None
    if model.config.get_text_config() is not model.config:  # what reads images has layers of the same names
        decoder = decoder_of(model)
        [name] = [name for name, module in model.named_modules() if module is decoder]
        exclude = rf"(?!{re.escape(name)}\.).*" if name else None

    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a factor: peft accepts any number, but is typed int
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets),
        exclude_modules=exclude,
        bias="none",
        base_model_name_or_path=base,
        task_type=None if base is None else "CAUSAL_LM",
    )


def base_name(name: str) -> str:
    """The parameter's name in the model without adapters."""
    return name.replace(f".{_BASE}", ".")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: the policy as it was before the run."""
    layers = list(_adapted(model).values())
    for layer in layers:
        own = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        layer.enable_adapters(enabled=False)
        for parameter in own:
            parameter.requires_grad_(True)  # peft clears it, but FSDP reads it once, in its first pass
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def merged_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(base name, base + adapter in this dtype) for every parameter; one without an adapter is returned unchanged."""
    adapters = {adapter.tensor: adapter for adapter in adapters_of(model)}
    factors = dict(adapter_parameters(model))
    for name, parameter in base_parameters(model):
        adapter = adapters.get(name)
        yield name, parameter if adapter is None else merged(parameter, adapter, factors, dtype)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's parameters, under their names in the model without adapters."""
    adapted = _adapted(model)
    for name, parameter in model.named_parameters():
        if not any(name.startswith(f"{owner}.lora_") for owner in adapted):
            yield base_name(name), parameter


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in peft's own files, adapter weight); nothing for a model without adapters."""
    adapted = _adapted(model)
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{owner}.lora_") for owner in adapted):
            yield _published(name), parameter


def published_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that change: the adapters, or all parameters if there are none."""
    yield from adapter_parameters(model) if _adapted(model) else model.named_parameters()


def adapters_of(model: nn.Module) -> tuple[Adapter, ...]:
    """How each adapter is merged; empty for a model without any."""
    found = []
    for owner, layer in _adapted(model).items():
        names = sorted(name for name, _ in layer.named_parameters() if not name.startswith(_BASE))
        [a, b] = (_published(f"{owner}.{name}") for name in names)
        is_embedding = isinstance(layer.get_base_layer(), nn.Embedding)
        found.append(
            Adapter(
                tensor=f"{owner}.weight",
                a=a,
                b=b,
                is_transposed=is_embedding or bool(layer.fan_in_fan_out),
                scale=float(layer.scaling[_ADAPTER]),
            )
        )
    return tuple(found)


def _published(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_ADAPTER}', '')}"


@torch.no_grad()
def merged(
    base: torch.Tensor, adapter: Adapter, factors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The merged parameter that is served, sharded like `base`. A collective, over the adapter's factors only."""
    left, right = (whole(factors[name]).to(dtype).double() for name in (adapter.b, adapter.a))
    if adapter.is_transposed:
        left, right = right.T, left.T
    first, rows = held_rows(base)
    found = torch.empty_like(rows, dtype=dtype)
    num_rows = max(1, _AT_ONCE // base.shape[1])
    for begin in range(0, len(rows), num_rows):
        some = slice(begin, min(begin + num_rows, len(rows)))
        product = _product(left[first + some.start : first + some.stop], right, dtype)
        found[some] = (rows[some].to(dtype).double() + product * adapter.scale).float().to(dtype)
    if not isinstance(base, DTensor):
        return found
    return DTensor.from_local(found, base.device_mesh, base.placements, shape=base.shape, stride=base.stride())


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product, exact unless terms differ by a factor of a million, so that summation order does not matter."""
    if dtype != torch.float32:
        return left @ right
    (left_high, left_low), (right_high, right_low) = _halves(left), _halves(right)
    return left_high @ right_high + left_high @ right_low + left_low @ right_high + left_low @ right_low


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = values.float().bfloat16().double()
    return high, values - high


def save_adapters(
    weights: Mapping[str, torch.Tensor],
    settings: schema.Lora,
    folder: Path,
    *,
    model: transformers.PreTrainedModel,
    base: str,
) -> None:
    """Save adapters so that peft loads them onto the base: `PeftModel.from_pretrained(model, folder)`."""
    _as_peft_says(settings, model, base=base).save_pretrained(str(folder))
    safetensors.torch.save_file(dict(weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _adapted(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
