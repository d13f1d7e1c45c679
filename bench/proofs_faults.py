"""What may be wrong with a tensor once an engine has loaded it, as files that differ from the mirror.

One kind of tensor at a time, in all layers at once: each is read back by itself, so company neither helps nor hides.
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
    name: str  # what is done
    kind: str  # of tensor
    tensors: Tensors  # those that are wrong


def updated(masters: Tensors, *, seed: int) -> dict[str, torch.Tensor]:
    """As a step of AdamW leaves them early on: everything moves by about the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: master + LR * torch.randn(master.shape, generator=generator).clamp(-2, 2)
        for name, master in masters.items()
    }


def served(masters: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: master.to(dtype) for name, master in masters.items()}


def faults(now: Tensors, before: Tensors, long_before: Tensors) -> Iterator[Fault]:
    """Of the weights that are served now, those of the version before, and those of five versions before."""
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
    """Names that differ in the number of their layer only."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        found[_LAYER.sub(".*.", name, count=1)].append(name)
    return found


def place(name: str) -> str:
    """The layer that a tensor belongs to, by whatever name an engine gives it."""
    match = _LAYER.search(name)
    return match[1] if match else "outside"
