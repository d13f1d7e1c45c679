"""Adapters (LoRA), and how they are merged into the tensors they change; `format` specifies the formula.

    pretrained W ─┐
    A, B, scale ──┴─► W + scale (B A), bit for bit what the learner computes

The learner computes the same with torch, from the parameters it trains (`learner.model.lora`). The two share the
formula and no code, so that equal digests are evidence. Blocks on the CPU only: about as long as ten copies of W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.errors import WeightsError
from streamrl.protocol.weights.format import Bits, DType, TensorMeta
from streamrl.protocol.wire.codec import Fields

_AT_ONCE = 1 << 17  # elements: 1 MB in float64 stays in the CPU's cache

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The tensors of one adapter, by name, and how to merge them."""

    tensor: str
    a: str  # [r, k]
    b: str  # [n, r]
    is_transposed: bool  # the tensor is [k, n]
    scale: float


def merge(
    adapter: Adapter, tensors: Mapping[str, TensorMeta], *, pretrained: Bits, a: Bits, b: Bits, out: Bits
) -> None:
    """Write the merged tensor to `out`; all arrays are flat."""
    meta = tensors[adapter.tensor]
    left = floats(b, meta.dtype).reshape(tensors[adapter.b].shape)
    right = floats(a, meta.dtype).reshape(tensors[adapter.a].shape)
    if adapter.is_transposed:
        left, right = right.T, left.T
    width = meta.shape[1]
    num_rows = max(1, _AT_ONCE // width)
    for first in range(0, meta.shape[0], num_rows):
        merged = _product(left[first : first + num_rows], right, meta.dtype)
        merged *= adapter.scale
        rows = slice(first * width, first * width + merged.size)
        merged += floats(pretrained[rows], meta.dtype).reshape(merged.shape)
        out[rows] = bits_of(merged, meta.dtype).reshape(-1)


def _product(left: Floats, right: Floats, dtype: DType) -> Floats:
    """Multiply such that every sum is exact in any order of addition, except for values a millionth of their
    neighbours.
    """
    if dtype != "float32":
        return left @ right
    (left_high, left_low), (right_high, right_low) = _halves(left), _halves(right)
    product: Floats = left_high @ right_high
    product += left_high @ right_low
    product += left_low @ right_high
    product += left_low @ right_low
    return product


def _halves(values: Floats) -> tuple[Floats, Floats]:
    high = floats(bits_of(values, "bfloat16"), "bfloat16")
    return high, values - high


def floats(bits: Bits, dtype: DType) -> Floats:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(f"<f{bits.itemsize}").astype(np.float64)


def bits_of(values: Floats, dtype: DType) -> Bits:
    """Cast to the dtype's bit patterns, to nearest even by way of float32, as torch casts."""
    narrow = values.astype(np.float32)
    if dtype == "float32":
        return narrow.view("<u4")
    if dtype == "float16":
        return narrow.astype(np.float16).view("<u2")
    wide = narrow.view(np.uint32)
    rounded: Bits = ((wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16).astype("<u2")
    rounded[np.isnan(narrow)] = 0x7FC0
    return rounded


def check_adapters(adapters: tuple[Adapter, ...], tensors: Mapping[str, TensorMeta]) -> None:
    """Raise WeightsError unless each adapter changes a tensor of its own, with factors of its own that fit."""
    named = [name for adapter in adapters for name in (adapter.tensor, adapter.a, adapter.b)]
    if len(set(named)) != len(named):
        raise WeightsError("a tensor belongs to two adapters")
    for adapter in adapters:
        merged, a, b = (tensors[name] for name in (adapter.tensor, adapter.a, adapter.b))
        shape = merged.shape[::-1] if adapter.is_transposed else merged.shape
        fits = len(a.shape) == len(b.shape) == 2 and b.shape[1:] == a.shape[:1] and (b.shape[0], a.shape[1]) == shape
        if not fits or not merged.dtype == a.dtype == b.dtype:
            raise WeightsError(f"the adapter of {adapter.tensor} does not fit it")


def read_adapters(f: Fields, names: Sequence[str]) -> tuple[Adapter, ...]:
    """Read the adapters of a manifest whose tensors have these names."""
    if "num_adapters" not in f:
        return ()
    count = f.integer("num_adapters", low=1, high=len(names))
    places = f.array("adapters", "<u4", count=3 * count).reshape(count, 3)
    transposed = f.array("transposed", "<u1", count=count)
    scales = f.array("scales", "<f8", count=count)
    if places.max() >= len(names) or transposed.max() > 1 or not np.isfinite(scales).all():
        raise WeightsError("a manifest's adapters name no tensors, or have no scale")
    return tuple(
        Adapter(tensor=names[tensor], a=names[a], b=names[b], is_transposed=bool(flag), scale=scale)
        for (tensor, a, b), flag, scale in zip(places.tolist(), transposed.tolist(), scales.tolist(), strict=True)
    )


def pack_adapters(adapters: tuple[Adapter, ...], places: Mapping[str, int]) -> dict[str, Any]:
    """Return the manifest's fields, none if there are no adapters; `places` maps a tensor's name to its index."""
    if not adapters:
        return {}
    triples = [(places[one.tensor], places[one.a], places[one.b]) for one in adapters]
    return {
        "num_adapters": len(adapters),
        "adapters": np.array(triples, "<u4").tobytes(),
        "transposed": bytes(one.is_transposed for one in adapters),
        "scales": np.array([one.scale for one in adapters], "<f8").tobytes(),
    }
