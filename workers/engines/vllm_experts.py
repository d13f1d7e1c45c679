"""Stacked experts as vLLM packs them on a CPU: at each load, and aside.

vLLM 0.32 packs them at the first load alone. A layer that has a kernel keeps it, and a reload copies what is not packed
to where the kernel looks for what is: the model answers with other log-probs and raises nothing. So a reload is to find
experts without a kernel (`vllm_weights`); it makes one, and packs, as the first load did.

On GPUs there is nothing to pack, and kernels stay: what is captured there points to them. Read in vLLM's code; on a GPU
no mixture ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


def packed_once(model: nn.Module) -> list[UnquantizedFusedMoEMethod]:
    """Of each layer of experts that is packed for a CPU."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return [
        method
        for method in methods
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU
    ]


def packed_aside(module: Any, aside: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor] | None:
    """A layer's experts as its kernel would pack these; None: it packs none, or not all are known."""
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
