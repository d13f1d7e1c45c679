"""Layers that vLLM quantises as they are loaded (`worker.engine_args.quantization`), and the same ones made once more.

    mirror, bfloat16 ─► vLLM's layerwise reload ─► weights and scales in eight bits: what serves
                     └► aside, by the same method of vLLM's ─────────────────────────► what it must be, to the bit

The reload quantises at each load: vLLM 0.32 keeps for that how a layer was before. Nothing is written in place, since
a scale is that of many weights (`vllm_places` finds no place for these layers): each version is loaded as a whole.

On CPUs linear layers alone, in FP8, by torch's own product. Experts, and FP8 on GPUs, are written against vLLM's
interface. No GPU has run this.
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
_KERNEL = "fp8_linear"  # of a method; it may keep what it packs


def is_quantized(module: nn.Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), OnlineLinearBase | OnlineMoEMethodBase)


def quantized_aside(module: Any, aside: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor] | None:
    """What the layer's method makes of these: weights, scales and all. None: not all are known."""
    device = next(module.parameters(recurse=False)).device
    layer = copy.copy(module)
    layer.__dict__ = {**module.__dict__, "_parameters": {}, "_buffers": dict(module._buffers)}
    layer.__dict__.pop(_DONE, None)
    for name, tensor in aside.items():
        if tensor is None:
            return None
        layer.register_parameter(name, nn.Parameter(tensor.to(device), requires_grad=False))
    method = copy.copy(module.quant_method)  # what it notes of a layer is not to be this one
    if hasattr(method, _KERNEL):
        setattr(method, _KERNEL, copy.copy(getattr(method, _KERNEL)))
    with torch.device(device):
        method.process_weights_after_loading(layer)
    return dict(layer.named_parameters(recurse=False))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of types that torch compares in none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
