"""Possible faults of a tensor after an engine has loaded it, as files that differ from the mirror.

One kind of tensor at a time, in all layers at once: each is read back separately, so one fault cannot affect another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]

_LAYER = re.compile(r"\.(\d+)\.")
LR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str  # the fault
    kind: str  # of tensor
    tensors: Tensors  # the faulty ones


def updated(masters: Tensors, *, seed: int) -> dict[str, torch.Tensor]:
    """Return the masters after an early AdamW step: every element moves by about the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: master + LR * torch.randn(master.shape, generator=generator).clamp(-2, 2)
        for name, master in masters.items()
    }


def served(masters: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: master.to(dtype) for name, master in masters.items()}


def faults(now: Tensors, before: Tensors, long_before: Tensors) -> Iterator[Fault]:
    """Yield faults from the served weights, those one version older, and those five versions older."""
    for kind, names in kinds(now).items():
        for what, wrong in _of_kind(names, now, before).items():
            differing = {name: tensor for name, tensor in wrong.items() if not torch.equal(tensor, now[name])}
            if differing:
                yield Fault(name=what, kind=kind, tensors=differing)
        if "lm_head" in kind or "embed" in kind:
            yield Fault(name="five versions old", kind=kind, tensors={name: long_before[name] for name in names})


def _of_kind(names: list[str], now: Tensors, before: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    neighbours = [*names[1:], names[0]]
    found = {
        "left behind": {name: before[name] for name in names},
        "scaled by 1.01": {name: (now[name].float() * 1.01).to(now[name].dtype) for name in names},
        "swapped": {name: now[other].clone() for name, other in zip(names, neighbours, strict=True)},
    }
    if now[names[0]].ndim == 2:
        found["transposed"] = {name: now[name].T.contiguous().view(now[name].shape) for name in names}
    return found


def kinds(tensors: Tensors) -> dict[str, list[str]]:
    """Group names that differ only in the layer number."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        found[_LAYER.sub(".*.", name, count=1)].append(name)
    return found


def place(name: str) -> str:
    """Return the layer that a tensor belongs to, under any engine's names."""
    match = _LAYER.search(name)
    return match[1] if match else "outside"
