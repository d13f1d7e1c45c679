"""Linear layers on CPUs in a packed layout that we can write single elements of.

vLLM's CPU build packs each linear layer when it is loaded. It prefers oneDNN, whose packed copy is inaccessible; its
other kernel, `weight_packed_linear`, takes the packed weight as a tensor. vLLM itself uses that kernel for small layers
on processors with AMX. Without AMX both are equally fast: on an EPYC with AVX512_BF16, 0.6 to 1.0 of oneDNN's time for
up to 16 rows at once and 1.0 to 1.04 for 512, and 99.97 % of the results are bit-identical. So in bfloat16, on
processors with AVX512_BF16 and without AMX, layers of suitable sizes are packed for it; all others stay as they are.

An embedding with a separate head is not packed at all: it is only used for lookups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from streamrl.workers.engines.vllm.loading.patches import TILE_COLUMNS, TILE_ROWS

_PACKED = "streamrl_packed"  # attribute of a layer
_COLUMNS = 32  # the kernel takes multiples of this


class WritableLinear(UnquantizedLinearMethod):
    """vLLM's method, except for the packed layout."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if _fits(layer):
            _pack(layer)
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)  # as vLLM's does
        else:
            super().process_weights_after_loading(layer)


class WritableEmbedding(UnquantizedEmbeddingMethod):
    """For heads: keeps the plain weight for lookups, beside the packed one."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if _fits(layer):
            _pack(layer)
        else:
            super().process_weights_after_loading(layer)


class LookedUp(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = nn.functional.linear


_OURS = (WritableLinear, WritableEmbedding, LookedUp)


def make_writable(model: nn.Module) -> None:
    """Replace the layers' methods; already packed layers are repacked by the next load."""
    has_fast_kernel = has_fast_packed_kernel()
    num_names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    has_head = any(isinstance(module, ParallelLMHead) for module in num_names)
    for module, num in num_names.items():
        method: Any = getattr(module, "quant_method", None)
        only_looked_up = type(module) is VocabParallelEmbedding and has_head and num == 1
        if type(method) is UnquantizedEmbeddingMethod and only_looked_up:
            method.__class__ = LookedUp
        elif has_fast_kernel and type(method) is UnquantizedEmbeddingMethod:
            method.__class__ = WritableEmbedding
        elif has_fast_kernel and type(method) is UnquantizedLinearMethod and not _is_skipped(module):
            method.__class__ = WritableLinear


@contextmanager
def as_vllm_packs(model: nn.Module) -> Iterator[None]:
    """Make loads inside pack as vLLM does by default, for benchmarks. Load again afterwards."""
    methods = {
        method for module in model.modules() if isinstance(method := getattr(module, "quant_method", None), _OURS)
    }
    kinds = [(method, type(method)) for method in methods]
    for method, kind in kinds:
        method.__class__ = kind.__bases__[0]
    try:
        yield
    finally:
        for method, kind in kinds:
            method.__class__ = kind


def packed(layer: nn.Module) -> torch.Tensor | None:
    """Return the weight in tiles; None if it is packed otherwise, or not at all."""
    found: torch.Tensor | None = layer.__dict__.get(_PACKED)
    return found


def in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """Return a [blocks, TILE_ROWS, pairs of columns] view of a packed weight's memory."""
    rows, columns = weight.shape
    pairs = weight.view(torch.int32)
    return pairs.view(rows // TILE_ROWS, columns // TILE_COLUMNS, TILE_ROWS).transpose(1, 2)


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """Return a [rows, columns] copy."""
    pairs = in_tiles(weight).reshape(weight.shape[0], -1)
    return pairs.contiguous().view(weight.dtype)  # with one block, the reshape made no copy


def _is_skipped(layer: nn.Module) -> bool:
    """Return whether vLLM skips this layer: a projection absorbed into others."""
    return bool(getattr(layer, "_cpu_skip_gemm_dispatch", False))


def has_fast_packed_kernel() -> bool:
    """Return whether the kernel with writable packed weights exists and is fast on this processor."""
    if not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return False
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        return False
    weight = torch.randn(2 * TILE_ROWS, 2 * _COLUMNS).bfloat16()
    return torch.equal(unpacked(torch.ops._C.convert_weight_packed(weight)), weight)  # vLLM 0.32's layout


def _fits(layer: Any) -> bool:
    weight: torch.Tensor = layer.weight
    return (
        weight.dtype == torch.bfloat16
        and not weight.is_meta
        and weight.ndim == 2
        and weight.shape[0] % TILE_ROWS == 0
        and weight.shape[1] % _COLUMNS == 0
    )


def _pack(layer: Any) -> None:
    weight = layer.weight.detach()
    packed_weight = packed(layer)
    if packed_weight is not None and packed_weight.shape == weight.shape:
        rows, columns = weight.shape
        plain = weight.contiguous().view(torch.int32).view(rows // TILE_ROWS, TILE_ROWS, columns // TILE_COLUMNS)
        in_tiles(packed_weight).copy_(plain)  # in place, in a third of the time vLLM takes
    else:
        packed_weight = torch.ops._C.convert_weight_packed(weight)
    layer.__dict__[_PACKED] = packed_weight
    layer.cpu_linear = _linear(packed_weight, len(weight))


def _linear(weight: torch.Tensor, num_rows: int) -> Callable[..., torch.Tensor]:
    def linear(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        added = None if bias is None else bias.float()  # the kernel requires fp32
        result: torch.Tensor = _custom_ops.weight_packed_linear_cpu(x, weight, num_rows, added)
        return result

    return linear
