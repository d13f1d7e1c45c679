"""Stacked experts in vLLM's packed CPU layout: repacking at each load, and packing a copy aside.

vLLM 0.32 packs experts only at the first load. A layer that already has a kernel keeps it, and a reload copies unpacked
weights to where the kernel expects packed ones: the model returns wrong logprobs and raises nothing. So before a reload
`transfer` removes the kernel from expert layers; the reload then creates one and packs, as the first load did.

On GPUs nothing is packed, and kernels must stay: captured CUDA graphs point into them. Unquantised experts keep theirs;
for those that vLLM quantises at each load it makes new ones, so `keeping_kernels` puts the old ones back. This was read
in vLLM's code; no GPU has run a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase


def packed_once(model: nn.Module) -> list[UnquantizedFusedMoEMethod]:
    """Return the method of each expert layer that is packed for a CPU."""
    return [
        method
        for method in _methods(model)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU
    ]


@contextmanager
def keeping_kernels(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep the kernels of experts that a load quantises. Their configuration refers to the layer's parameters, which a
    reload updates where they are."""
    methods = [] if device.type == "cpu" else [m for m in _methods(model) if isinstance(m, OnlineMoEMethodBase)]
    kept = [(method, method.moe_kernel, method.moe_quant_config) for method in methods]
    yield
    for method, kernel, quant_config in kept:
        method.moe_kernel, method.moe_quant_config = kernel, quant_config


def _methods(model: nn.Module) -> list[Any]:
    return [getattr(module, "quant_method", None) for module in model.modules()]


def packed_aside(module: Any, aside: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor] | None:
    """Return a layer's experts as its kernel packs them; None if it packs none, or if a tensor is unknown."""
    if getattr(module, "quant_method", None) not in packed_once(module):
        return None
    layer: Any = nn.Module()
    layer.moe_config, layer.activation = module.moe_config, module.activation
    for name, tensor in aside.items():
        if tensor is None:
            return None
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
    return dict(layer.named_parameters())
