"""Layers that vLLM quantises while loading (`worker.engine_args.quantization`), and reference copies of them.

    mirror, bfloat16 ─► vLLM's layerwise reload ─► 8-bit weights and scales, which the engine serves
                     └► aside, by the same vLLM method ─► the expected bits

Each reload quantises again: vLLM 0.32 keeps each layer's original form for that. Nothing is written in place, since
many weights share a scale (`places` finds no place for these layers): each version is loaded in full.

On CPUs only linear layers are quantised, in FP8, with torch's own matmul. Experts, and FP8 on GPUs, are written against
vLLM's interface. No GPU has run this.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

_DONE = "_already_called_process_weights_after_loading"
_KERNEL = "fp8_linear"  # attribute of a method, which may keep what it packs


def is_quantized(module: nn.Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), OnlineLinearBase | OnlineMoEMethodBase)


def quantized_aside(module: Any, aside: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor] | None:
    """Return what the layer's method makes of these tensors, scales included; None if one is missing."""
    device = next(module.parameters(recurse=False)).device
    layer = copy.copy(module)
    layer.__dict__ = {**module.__dict__, "_parameters": {}, "_buffers": dict(module._buffers)}
    layer.__dict__.pop(_DONE, None)
    for name, tensor in aside.items():
        if tensor is None:
            return None
        layer.register_parameter(name, nn.Parameter(tensor.to(device), requires_grad=False))
    method = copy.copy(module.quant_method)  # keep its per-layer state out of the original
    if hasattr(method, _KERNEL):
        setattr(method, _KERNEL, copy.copy(getattr(method, _KERNEL)))
    with torch.device(device):
        method.process_weights_after_loading(layer)
    return dict(layer.named_parameters(recurse=False))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes, also of dtypes that torch cannot compare."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
