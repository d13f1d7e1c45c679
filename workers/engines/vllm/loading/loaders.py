"""Finds out where vLLM's loaders put each checkpoint tensor, without loading anything.

    tensors ─► model.load_weights ─► each parameter's loader, replaced by a recorder of its calls

A parameter can then be loaded into separate memory, as vLLM would leave it before packing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

# Arguments of one call to a parameter's loader, without the parameter itself.
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def loader_calls(
    model: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[str, nn.Module, dict[str, list[Call]]]]:
    """Return each layer with the loader calls of its parameters; a tied head has those of the embedding."""
    calls: dict[nn.Module, dict[str, list[Call]]] = defaultdict(lambda: defaultdict(list))
    with _recording(model, calls):
        model.load_weights(tensors)
    named = [(name, module, dict(calls[module])) for name, module in model.named_modules() if module in calls]
    embedding = next((module for module in model.modules() if type(module) is VocabParallelEmbedding), None)
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and module not in calls and embedding in calls:
            named.append((name, module, {"weight": calls[embedding]["weight"]}))
    return named


@contextmanager
def _recording(model: nn.Module, calls: Mapping[nn.Module, Mapping[str, list[Call]]]) -> Iterator[None]:
    """Replace the loaders inside by recorders, which load nothing."""

    def recorder(module: nn.Module, name: str) -> Callable[..., bool]:
        def record(*args: Any, **kwargs: Any) -> bool:
            others = {key: value for key, value in kwargs.items() if key != "param"}
            calls[module][name].append((args[1:], others))
            return True

        return record

    original_loaders: list[tuple[Any, Any]] = []
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                original_loaders.append((parameter, getattr(parameter, "weight_loader", None)))
                parameter.weight_loader = recorder(module, name)
    try:
        yield
    finally:
        for parameter, loader in reversed(original_loaders):  # a parameter shared by two layers appears twice
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader


def loaded_aside(module: nn.Module, name: str, calls: list[Call]) -> torch.Tensor | None:
    """Return the parameter as vLLM's loader leaves it before packing; None if that is unknown."""
    fresh = blank(module, name)
    if fresh is None:
        return None
    for args, kwargs in calls:
        load_into(fresh, *args, **kwargs)
    loaded: torch.Tensor = fresh.data
    return loaded


def blank(module: nn.Module, name: str) -> Any:
    """Return an empty parameter, as before loading, in its own memory; None if its form is unknown."""
    info = get_layerwise_info(module)
    metadata = info.restore_metadata[0].get(name)
    live = module._parameters[name]
    if metadata is not None:
        return materialize_meta_tensor(restore_layer_refs(metadata, module))
    if live is None or not live.numel():
        return None
    fresh = torch.empty_like(live, device="cpu")
    fresh.__class__ = live.__class__
    fresh.__dict__ = dict(live.__dict__)
    return fresh


def load_into(fresh: Any, *args: Any, **kwargs: Any) -> None:
    load: Any = getattr(fresh, "weight_loader", default_weight_loader)
    while load.__name__ == "online_process_loader":  # a reload's wrapper, which it leaves in place
        load = load.__wrapped__
    load(fresh, *args, **kwargs)


def written_past_loaders(model: nn.Module, loaded: set[str]) -> list[str]:
    """Return parameters that the model's own code claims to have loaded without calling a loader. vLLM's reload tracks
    loader calls only, so it misses these."""
    lost = []
    for layer_name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # otherwise all parameters arrived
            arrived = {name for name, _ in info.loaded_weights}
            not_arrived = {
                f"{layer_name}.{name}": p
                for name, p in layer._parameters.items()
                if p is not None and name not in arrived
            }
            lost += [name for name, parameter in not_arrived.items() if name in loaded and parameter.is_meta]
    return sorted(lost)
