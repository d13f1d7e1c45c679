"""What vLLM's layers compute with, held against what they should: a part of each of vLLM's worker processes.

    mirror ─► vLLM's own loaders, which write down where each tensor goes ─► a layer at a time, loaded aside ─┐
    the layer that serves ─► its parameters; packed ones answer unit vectors with their columns ──────────────┴─ equal?

Bits are compared, so nothing here depends on how deep a model is or how its dtype rounds. A linear layer that vLLM has
packed for a CPU keeps no parameter that could be read; multiplied with a unit vector it gives a column of its weights,
exactly, in any dtype. Some columns of each are asked for, others each time: a layer that a reload left behind differs
in all of them, a tensor of which some elements are wrong shows in the columns that hold them.

What it cannot see: parameters that a kernel keeps in a form of its own (experts, absorbed projections), which are named
as unreadable, and what a loader does to all readers alike, such as taking one tensor for another. Both are the
canary's (`proving`). Memory: one layer on the host. Blocks the engine while it lasts, between two of its steps.

With tensor parallelism each process reads its own shard back. On GPUs parameters are compared on the host; that way was
never run here.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from streamrl.workers.engines.mapped_file import MappedFile

_NUM_COLUMNS = 64  # of each packed layer, at a time
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # what they keep is what they were given


# What a loader was asked to write into a parameter: its words but the parameter itself.
_Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class ReadBackExtension:
    """vLLM mixes it into its worker: what is not ours here is the worker's."""

    def streamrl_read_back(self, path: str, number: int, num_parts: int) -> dict[str, Any]:
        """Of each of `num_parts` layers the one whose turn it is: which are wrong, which could not be read, how many
        were read."""
        worker: Any = self
        with torch.no_grad(), torch.device("cpu"):
            calls = _where_tensors_go(worker.get_model(), path)
            reader = _Reader(columns=random.Random(number))
            for at, (name, module, of_module) in enumerate(calls):
                if (at + number) % num_parts == 0:
                    reader.read(name, module, of_module)
        return {"wrong": reader.wrong, "unreadable": reader.unreadable, "num_read": reader.num_read}


def _where_tensors_go(model: Any, path: str) -> list[tuple[str, nn.Module, dict[str, list[_Call]]]]:
    """Each layer with what it is to be given, by parameter; a head that is the embedding has the embedding's."""
    calls: dict[nn.Module, dict[str, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    with _writing_down(model, calls):
        model.load_weights(MappedFile().tensors(path))
    named = [(name, module, dict(calls[module])) for name, module in model.named_modules() if module in calls]
    embedding = next((module for module in model.modules() if type(module) is VocabParallelEmbedding), None)
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and module not in calls and embedding in calls:
            named.append((name, module, {"weight": calls[embedding]["weight"]}))
    return named


@contextmanager
def _writing_down(model: nn.Module, calls: Mapping[nn.Module, Mapping[str, list[_Call]]]) -> Iterator[None]:
    """Inside, loaders write down what they are asked to load, and load nothing."""

    def recorder(module: nn.Module, name: str) -> Callable[..., bool]:
        def record(*args: Any, **kwargs: Any) -> bool:
            others = {word: value for word, value in kwargs.items() if word != "param"}
            calls[module][name].append((args[1:], others))
            return True

        return record

    before: list[tuple[Any, Any]] = []
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if parameter is not None:
                before.append((parameter, getattr(parameter, "weight_loader", None)))
                parameter.weight_loader = recorder(module, name)
    try:
        yield
    finally:
        for parameter, loader in reversed(before):  # one that two layers share was met twice
            if loader is None:
                del parameter.weight_loader
            else:
                parameter.weight_loader = loader


class _Reader:
    def __init__(self, *, columns: random.Random) -> None:
        self.wrong: list[str] = []
        self.unreadable: list[str] = []
        self.num_read = 0
        self._columns = columns

    def read(self, name: str, module: nn.Module, calls: Mapping[str, list[_Call]]) -> None:
        for parameter, of_parameter in calls.items():
            expected = _loaded_aside(module, parameter, of_parameter)
            equal = None if expected is None else self._is_served(module, parameter, expected)
            if equal is None:
                self.unreadable.append(f"{name}.{parameter}")
                continue
            self.num_read += 1
            if not equal:
                self.wrong.append(f"{name}.{parameter}")

    def _is_served(self, module: nn.Module, name: str, expected: torch.Tensor) -> bool | None:
        """None: there is no telling."""
        live = module._parameters[name]
        method = getattr(module, "quant_method", None)
        packed = name == "weight" and expected.ndim == 2 and hasattr(module, "cpu_linear")
        if live is None or not (method is None or isinstance(method, _PLAIN)):
            return None
        if live.numel() == 0:
            return self._columns_agree(module, expected) if packed else None
        if live.shape != expected.shape:
            return None
        agrees = torch.equal(live.detach().cpu(), expected)
        return agrees and (not packed or self._columns_agree(module, expected))

    def _columns_agree(self, module: Any, expected: torch.Tensor) -> bool:
        width = expected.shape[1]
        columns = self._columns.sample(range(width), min(_NUM_COLUMNS, width))
        units = torch.zeros(len(columns), width, dtype=expected.dtype)
        units[range(len(columns)), columns] = 1
        answered: torch.Tensor = module.quant_method.apply(module, units, None)
        return torch.equal(answered, expected[:, columns].T)


def _loaded_aside(module: nn.Module, name: str, calls: list[_Call]) -> torch.Tensor | None:
    """The parameter as vLLM's loader would leave it, before whatever it is packed into; None: not known."""
    info = get_layerwise_info(module)
    blank = info.restore_metadata[0].get(name)
    live = module._parameters[name]
    if blank is not None:
        fresh = materialize_meta_tensor(restore_layer_refs(blank, module))
    elif live is not None and live.numel():
        fresh = torch.empty_like(live, device="cpu")
        fresh.__class__ = live.__class__
        fresh.__dict__ = dict(live.__dict__)
    else:
        return None
    load: Any = getattr(fresh, "weight_loader", default_weight_loader)
    while load.__name__ == "online_process_loader":  # what a reload wrapped around it, and leaves there
        load = load.__wrapped__
    for args, kwargs in calls:
        load(fresh, *args, **kwargs)
    return fresh.data
