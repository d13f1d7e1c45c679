"""The probe: weights that are visibly not the model's, and what they must give.

    mirror ─► every tensor changed ─► probe file ─► engine (a reload like any other) ─► log-probs ─┐
                                          └───────► plain forward pass on the CPU ─► log-probs ────┴─ compared

Matrices have their rows in reverse, vectors are stretched: each tensor counts, so one that a reload leaves behind
(packed weights, a tied head) shows in the answer. The unit of the comparison is how far apart the model and the probe
are. Measured on small models, fp32: any single tensor left behind shows, but for some biases of keys. In bf16 rounding
alone is about 2 % of that distance, so a tenth of it is let pass: embeddings, heads, whole layers show; one layer's
bias need not.

Takes, while it lasts, the model's size once more in shared memory and once in the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from streamrl.errors import LoadRejected
from streamrl.weights import tensorfile
from streamrl.weights.format import TensorMeta
from workers.engines.hf_model import build_model, load_weights, token_logprobs
from workers.model import ModelFacts

_TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.1}  # of the distance between model and probe
_NUM_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    path: Path  # a safetensors file
    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T-1] what an engine that serves the file must answer
    visible: float  # mean distance to what the model itself gives
    tolerance: float  # mean distance that is let pass

    def check(self, answered: Sequence[float]) -> None:
        distance = _distance(answered, self.logprobs)
        if not distance <= self.tolerance:
            raise LoadRejected(
                f"the engine does not serve what it was told to load: after a reload its log-probs are {distance:.3g} "
                f"away from those of a plain forward pass, {self.tolerance:.3g} is let pass"
            )


def make_probe(
    mirror: Path, tensors: Sequence[TensorMeta], *, folder: Path, model: ModelFacts, dtype: str, trust_remote_code: bool
) -> Probe:
    """Blocks for two loads and two short forward passes on the CPU. The caller removes the file."""
    path = folder / "probe.safetensors"
    write_changed(mirror, tensors, path)
    token_ids = tuple(7 * i % model.vocab_size for i in range(1, _NUM_TOKENS + 1))
    reference = build_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
    load_weights(reference, mirror)
    plain = token_logprobs(reference, list(token_ids))
    load_weights(reference, path)
    logprobs = token_logprobs(reference, list(token_ids))
    visible = _distance(plain, logprobs)
    return Probe(
        path=path,
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        visible=visible,
        tolerance=_TOLERANCE[dtype] * visible,
    )


def write_changed(source: Path, tensors: Sequence[TensorMeta], target: Path) -> None:
    """The same tensors, each visibly changed."""
    views = tensorfile.create(target, tensors)
    with safe_open(source, framework="pt") as file:
        for tensor in tensors:
            changed = _changed(file.get_tensor(tensor.name)).contiguous().flatten()
            views[tensor.name][:] = changed.view(torch.uint8).numpy().view(views[tensor.name].dtype)


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim >= 2:
        return tensor.flip(0)
    # Norms begin as ones and biases as zeros, of which the reverse is the same.
    stretch = torch.tensor([2.0, 0.5]).repeat(tensor.numel() // 2 + 1)[: tensor.numel()].reshape(tensor.shape)
    return (tensor.float() * stretch + 0.1).to(tensor.dtype)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.abs(np.subtract(one, other)).mean())
