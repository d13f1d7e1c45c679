"""Packed flash attention against one PyTorch call per sequence: is it as fast as expected, and equal?

With prompts that responses share, it is also compared with the same sequences that each repeat theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench.gpu_check.rows import Row, Scale
from bench.measure import seconds
from streamrl.learner.packing.attention import attend, each_by_itself
from streamrl.learner.packing.prefixes import each_with_its_prompt, prefixes_of

_OFF = 0.02  # relative to the largest value: bf16 rounds by 0.004, and the two sum in different orders

Way = Callable[[], torch.Tensor]


def check(scale: Scale) -> Iterator[Row]:
    yield from _whole(scale)
    yield from _shared(scale)


def _whole(scale: Scale) -> Iterator[Row]:
    lengths = [7, 1, 24] if scale.is_reduced else [4096, 128, 900, 6000, 37, 5223]
    leaves, where = _leaves(scale, sum(lengths)), _starts(scale, lengths)

    def alone() -> torch.Tensor:
        return each_by_itself(*_flat(leaves), *where.values(), scale=None, window=None)

    yield from _compared("", leaves, {"packed": _attending(leaves, where), "each by itself": alone}, scale)


def _shared(scale: Scale) -> Iterator[Row]:
    prompts, responses = ([3, 5], [7, 1, 4]) if scale.is_reduced else ([2048, 300], [300, 1700, 900, 60, 700, 900, 400])
    lengths = [length for prompt in prompts for length in (prompt, *responses)]
    positions = [np.arange(length) + (0 if i % (1 + len(responses)) == 0 else 1) for i, length in enumerate(lengths)]
    leaves, where = _leaves(scale, sum(lengths)), _starts(scale, lengths)
    prefixes = prefixes_of(np.cumsum([0, *lengths]), np.concatenate(positions))
    assert prefixes is not None
    prefixes = prefixes.to(scale.device)

    def alone() -> torch.Tensor:
        return each_with_its_prompt(*_flat(leaves), where["cu_seq_lens_q"], prefixes, scale=None)

    ways = {"packed": _attending(leaves, {**where, "prefixes": prefixes}), "each with its prompt": alone}
    yield from _compared("shared prompts, ", leaves, ways, scale)
    repeated = [prompt + response for prompt in prompts for response in responses]
    leaves = _leaves(scale, sum(repeated))
    _, took_s = _passes(_attending(leaves, _starts(scale, repeated)), leaves, scale)
    yield Row(what="prompts repeated", value=took_s * 1e3, unit="ms", note=f"{sum(repeated):,} tokens")


def _leaves(scale: Scale, tokens: int) -> Sequence[torch.Tensor]:
    heads, kv_heads, width = (4, 2, 32) if scale.is_reduced else (28, 4, 128)
    torch.manual_seed(0)
    return [
        torch.randn(1, num, tokens, width, device=scale.device, dtype=torch.bfloat16, requires_grad=True)
        for num in (heads, kv_heads, kv_heads)
    ]


def _flat(leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in leaves)
    return query, key, value


def _starts(scale: Scale, lengths: Sequence[int]) -> dict[str, Any]:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"cu_seq_lens_q": starts.to(scale.device), "max_length_q": max(lengths)}


def _attending(leaves: Sequence[torch.Tensor], where: dict[str, Any]) -> Way:
    return lambda: attend(torch.nn.Identity(), *leaves, None, **where)[0].flatten(0, 1)


def _compared(name: str, leaves: Sequence[torch.Tensor], ways: dict[str, Way], scale: Scale) -> Iterator[Row]:
    found = {way: _passes(attended, leaves, scale) for way, attended in ways.items()}
    for what, ours, truth in zip(
        ("output", "d query", "d key", "d value"), *(one[0] for one in found.values()), strict=True
    ):
        off = float((ours - truth).abs().max() / truth.abs().max())
        yield Row(what=f"{name}{what}: largest difference", value=off, unit="of max", goal=_OFF, better="lower")
    for way, (_, took_s) in found.items():
        note = f"forward and backward of {leaves[0].shape[2]:,} tokens"
        yield Row(what=f"{name}{way}", value=took_s * 1e3, unit="ms", note=note)


def _passes(way: Way, leaves: Sequence[torch.Tensor], scale: Scale) -> tuple[list[torch.Tensor], float]:
    def once() -> list[torch.Tensor]:
        out = way()
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        if scale.device.type == "cuda":
            torch.cuda.synchronize(scale.device)
        return [each.detach().float() for each in (out, *grads)]

    found = once()
    return found, min(seconds(once) for _ in range(3))
