"""Logprobs of the mirror's weights without an engine: a plain transformers model, filled layer by layer.

    truth       the weights as served, computed one precision higher              bfloat16 -> float32 -> float64
    rounding    how far the same model is from the truth when it computes in the served dtype, and for engines that
                quantise (`worker.engine_args.quantization`) with weights and inputs rounded to eight bits (`rounded`)

Both use the same tokens and weights, so their distance is the current rounding error of this model's depth, width and
dtype: the unit in which an engine's distance from the truth is judged (`workers.proofs.proving`).

Only embeddings, head and the layer being computed are in memory; nothing is kept between two calls. It runs on the
host's CPU even if engines have GPUs: 64 tokens of a 7B model take some seconds on 16 cores (not measured).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from streamrl.config.engine_args import Form
from streamrl.workers.engines.hf_model import build_model, persistent_buffers, token_logprobs
from streamrl.workers.engines.mapped_file import MappedFile
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.proofs.rounded import is_linear, is_rounded, rounded_as_in, rounding_inputs

_HIGHER: Mapping[str, torch.dtype] = {"float32": torch.float64, "bfloat16": torch.float32}

LogProbs = npt.NDArray[np.float64]  # [T - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A sequence's logprobs, and how far rounding moves them."""

    truth: LogProbs
    rounding: float  # mean distance


class Reference:
    def __init__(self, model: ModelFacts, *, dtype: str, form: Form | None = None) -> None:
        self._facts, self._dtype, self._form = model, dtype, form
        self._shells: dict[torch.dtype, _Shell] = {}  # by the dtype they compute in

    def judge(self, mirror: Path, token_ids: Sequence[int]) -> Judged:
        """Run two forward passes and block on them; the mirror must not change meanwhile."""
        tensors = dict(MappedFile().tensors(str(mirror)))
        truth = self._logprobs(tensors, token_ids, _HIGHER[self._dtype])
        served = self._logprobs(tensors, token_ids, getattr(torch, self._dtype), self._form)
        return Judged(truth=truth, rounding=float(np.abs(served - truth).mean()))

    def _logprobs(
        self,
        tensors: Mapping[str, torch.Tensor],
        token_ids: Sequence[int],
        dtype: torch.dtype,
        form: Form | None = None,
    ) -> LogProbs:
        if dtype not in self._shells:
            self._shells[dtype] = _build(self._facts, dtype)
        with _filled(self._shells[dtype], tensors, dtype, form) as model:
            return np.asarray(token_logprobs(model, list(token_ids)), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shell:
    """A model without weights."""

    model: nn.Module
    names: Mapping[tuple[nn.Module, str], str]  # each parameter's name in the mirror; a tied head has the embedding's
    buffers: Sequence[tuple[str, nn.Module, str]]  # buffers published with the weights: their names there and here


def _build(model: ModelFacts, dtype: torch.dtype) -> _Shell:
    """Build the model with parameters on `meta` and buffers in memory, as the model computes them."""
    built = build_model(model, dtype=dtype, within=torch.device("meta"))
    for name, buffer in list(built.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(built.get_submodule(owner), leaf, torch.empty_like(buffer, device="cpu"))
    built.initialize_weights()  # of what is in memory
    built.tie_weights()  # materialising the buffers may have untied them
    published = {parameter: name for name, parameter in built.named_parameters()}
    names = {
        (module, leaf): published[parameter]
        for module in built.modules()
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    }
    return _Shell(model=built, names=names, buffers=list(persistent_buffers(built)))


@contextmanager
def _filled(
    shell: _Shell, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, form: Form | None
) -> Iterator[nn.Module]:
    """Let layers take their weights when called and release them afterwards; everything else keeps them throughout."""

    def fill(modules: Sequence[nn.Module], form: Form | None = None) -> None:
        for module in modules:
            for leaf in module._parameters:
                if (name := shell.names.get((module, leaf))) is not None:
                    weight = tensors[name]
                    if form is not None and is_rounded(module, weight):
                        weight = rounded_as_in(module, weight, form)
                    module._parameters[leaf] = nn.Parameter(weight.to(dtype), requires_grad=False)

    for name, owner, leaf in shell.buffers:
        owner._buffers[leaf] = tensors[name].clone()
    layers = [layer for stack in shell.model.modules() if isinstance(stack, nn.ModuleList) for layer in stack]
    inner = {module for layer in layers for module in layer.modules()}
    hooks: list[Any] = []
    for layer in layers:
        own = list(layer.modules())
        hooks.append(layer.register_forward_pre_hook(lambda *_, own=own: fill(own, form)))
        hooks.append(layer.register_forward_hook(lambda *_, own=own: _empty(own)))
    fill([module for module in shell.model.modules() if module not in inner])
    if form is not None:
        hooks += [module.register_forward_pre_hook(rounding_inputs(form)) for module in inner if is_linear(module)]
    try:
        yield shell.model
    finally:
        for hook in hooks:
            hook.remove()
        _empty(list(shell.model.modules()))


def _empty(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)
