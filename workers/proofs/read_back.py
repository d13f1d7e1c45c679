"""Compares what vLLM's layers compute with to what they should, inside each of vLLM's worker processes.

    mirror ─► vLLM's own loaders, which record where each tensor goes ─► a layer at a time, loaded aside ─────┐
    the serving layer ─► its parameters; a packed one is multiplied with unit vectors for its columns ────────┴─ equal?

Bits are compared, so neither the model's depth nor its dtype's rounding matters. A linear layer that vLLM has packed
for a CPU keeps no readable parameter, but multiplied with a unit vector it returns a column of its weights exactly, in
any dtype. Each time a random set of columns is checked: a layer that a reload left behind differs in all of them, a
partly wrong tensor in the columns that hold its wrong elements. Experts packed for a CPU are compared whole, with
others packed aside.

What it cannot see: parameters that a kernel keeps in its own form (experts on GPUs, absorbed projections), which are
reported as unreadable, and what a loader does to all readers alike, such as taking one tensor for another. Both are
left to the canary (`proving`). Memory: one layer on the host, experts of a layer twice. Blocks the engine while it
runs, between two of its steps.

With tensor parallelism each process reads its own shard back. On GPUs parameters are compared on the host; several GPUs
to an engine have not been tried.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from streamrl.workers.engines.mapped_file import MappedFile
from streamrl.workers.engines.vllm.loading.experts import packed_aside, packed_once
from streamrl.workers.engines.vllm.loading.linears import packed, unpacked
from streamrl.workers.engines.vllm.loading.loaders import Call, loaded_aside, loader_calls
from streamrl.workers.engines.vllm.loading.quantized import is_quantized, quantized_aside, same_bits
from streamrl.workers.engines.vllm.ranks import prepare_rank

_NUM_COLUMNS = 64  # per packed layer and read-back
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # these keep parameters as they were loaded


class ReadBackExtension:
    """Mixed into vLLM's worker class; `self` is the worker."""

    def streamrl_read_back(self, path: str, number: int, num_parts: int) -> dict[str, Any]:
        """Read back the layers whose turn it is, one of every `num_parts`. Return which are wrong, which could not be
        read, and how many were read."""
        worker: Any = self
        with torch.no_grad(), torch.device("cpu"):
            transfer = worker.weight_transfer_engine
            named = transfer.in_files(MappedFile().tensors(transfer.path_here(path)))
            calls = loader_calls(worker.get_model(), named)
            reader = _Reader(columns=random.Random(number))
            for at, (name, module, of_module) in enumerate(calls):
                if (at + number) % num_parts == 0:
                    reader.read(name, module, of_module)
        return {"wrong": reader.wrong, "unreadable": reader.unreadable, "num_read": reader.num_read}

    def streamrl_prepare(self) -> list[str]:
        """See `engines.vllm.ranks`."""
        worker: Any = self
        return prepare_rank(worker.model_runner)

    def streamrl_places(self, path: str) -> dict[str, Any]:
        """See `MirrorWeightTransfer.places`."""
        worker: Any = self
        found: dict[str, Any] = worker.weight_transfer_engine.places(path)
        return found


class _Reader:
    def __init__(self, *, columns: random.Random) -> None:
        self.wrong: list[str] = []
        self.unreadable: list[str] = []
        self.num_read = 0
        self._columns = columns

    def read(self, name: str, module: nn.Module, calls: Mapping[str, list[Call]]) -> None:
        if not _is_readable(module):
            self.unreadable += [f"{name}.{parameter}" for parameter in calls]
            return
        aside = {parameter: loaded_aside(module, parameter, given) for parameter, given in calls.items()}
        made = quantized_aside(module, aside) if is_quantized(module) else packed_aside(module, aside)
        if made is not None:
            for parameter, expected in made.items():
                self._note(f"{name}.{parameter}", same_bits(module.get_parameter(parameter), expected))
            return
        for parameter, given in aside.items():
            self._note(f"{name}.{parameter}", None if given is None else self._is_served(module, parameter, given))

    def _note(self, name: str, equal: bool | None) -> None:
        if equal is None:
            self.unreadable.append(name)
            return
        self.num_read += 1
        if not equal:
            self.wrong.append(name)

    def _is_served(self, module: nn.Module, name: str, expected: torch.Tensor) -> bool | None:
        """Return whether the module serves these weights; None if that cannot be determined."""
        live = module._parameters[name]
        is_packed = name == "weight" and expected.ndim == 2 and hasattr(module, "cpu_linear")
        if live is None or not _is_plain(module):
            return None
        if live.numel() == 0:
            return self._columns_agree(module, expected) if is_packed else None
        if live.shape != expected.shape:
            return None
        agrees = torch.equal(live.detach().cpu(), expected)
        return agrees and (not is_packed or self._columns_agree(module, expected))

    def _columns_agree(self, module: Any, expected: torch.Tensor) -> bool:
        if (weight := packed(module)) is not None and not torch.equal(unpacked(weight), expected):
            return False
        width = expected.shape[1]
        columns = self._columns.sample(range(width), min(_NUM_COLUMNS, width))
        units = torch.zeros(len(columns), width, dtype=expected.dtype)
        units[range(len(columns)), columns] = 1
        product: torch.Tensor = module.quant_method.apply(module, units, None)
        return torch.equal(product, expected[:, columns].T)


def _is_readable(module: nn.Module) -> bool:
    """Asked before anything is loaded aside: a layer's experts are gigabytes, and the engine waits."""
    return _is_plain(module) or is_quantized(module) or bool(packed_once(module))


def _is_plain(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is None or isinstance(method, _PLAIN)
