"""Rounds weights and inputs of a plain model to eight bits the way a quantising engine does.

    x ─► x / scale ─► float8_e4m3fn ─► times scale       scale: the largest of a part of x, over that of the type

The parts: for fp8_per_tensor the whole weight, or all inputs of a layer; for fp8_per_channel a row of the weight, or a
token; for fp8_per_block 128 of its rows and columns, or 128 values of a token. vLLM quantises linear layers and
experts, neither embeddings nor heads. For experts only weights are rounded here, which underestimates their noise; this
was never compared with an engine with quantised experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from streamrl.config.engine_args import Form

_BLOCK = 128
_TYPE = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_TYPE).max


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def is_rounded(module: nn.Module, weight: Tensor) -> bool:
    """Return whether the engine quantises this weight of a module inside a layer (not an embedding or a head)."""
    return weight.ndim == 3 or (is_linear(module) and weight.ndim == 2)


def rounded_as_in(module: nn.Module, weight: Tensor, form: Form) -> Tensor:
    """Round a module's weight; GPT-2's Conv1D stores the transpose of a linear layer."""
    return rounded_weight(weight.T, form).T if isinstance(module, Conv1D) else rounded_weight(weight, form)


def rounded_weight(weight: Tensor, form: Form) -> Tensor:  # [..., rows, columns]
    if form == "fp8_per_tensor":
        return _rounded(weight, weight.abs().amax(dim=(-2, -1), keepdim=True))
    if form == "fp8_per_channel":
        return _rounded(weight, weight.abs().amax(dim=-1, keepdim=True))
    return _rounded(weight, _spread(_spread(weight.abs(), -1), -2))


def rounded_input(given: Tensor, form: Form) -> Tensor:  # [..., columns]
    if form == "fp8_per_tensor":
        return _rounded(given, given.abs().amax())
    if form == "fp8_per_channel":
        return _rounded(given, given.abs().amax(dim=-1, keepdim=True))
    return _rounded(given, _spread(given.abs(), -1))


def rounding_inputs(form: Form) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return a forward pre-hook for a linear layer."""

    def hook(_module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded_input(given[0], form), *given[1:])

    return hook


def _spread(values: Tensor, dim: int) -> Tensor:
    """Replace each value by the largest of its block along this dimension."""
    size = values.shape[dim]
    blocks = [block.amax(dim=dim, keepdim=True).expand_as(block) for block in values.split(_BLOCK, dim=dim)]
    found = torch.cat(blocks, dim=dim)
    assert found.shape[dim] == size, "blocks cover all of it"
    return found


def _rounded(values: Tensor, largest: Tensor) -> Tensor:
    scale = (largest.float() / _FLOAT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return ((values.float() / scale).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(_TYPE).float() * scale).to(values.dtype)
