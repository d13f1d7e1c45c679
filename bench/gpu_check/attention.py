"""Packed flash attention against one PyTorch call per sequence: is it as fast as expected, and equal?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.gpu_check.rows import Row, Scale
from bench.measure import seconds
from streamrl.learner.packing.attention import attend, each_by_itself

_OFF = 0.02  # relative to the largest value: bf16 rounds by 0.004, and the two sum in different orders


def check(scale: Scale) -> Iterator[Row]:
    lengths = [7, 1, 24] if scale.is_reduced else [4096, 128, 900, 6000, 37, 5223]
    heads, kv_heads, width = (4, 2, 32) if scale.is_reduced else (28, 4, 128)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(scale.device)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, num, sum(lengths), width, device=scale.device, dtype=torch.bfloat16, requires_grad=True)
        for num in (heads, kv_heads, kv_heads)
    )

    def packed() -> torch.Tensor:
        where = {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}
        return attend(torch.nn.Identity(), query, key, value, None, **where)[0].flatten(0, 1)

    def alone() -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return each_by_itself(q, k, v, starts, max(lengths), scale=None, window=None)

    found = {name: _passes(way, (query, key, value), scale) for name, way in {"packed": packed, "alone": alone}.items()}
    for what, ours, truth in zip(
        ("output", "d query", "d key", "d value"), *(one[0] for one in found.values()), strict=True
    ):
        off = float((ours - truth).abs().max() / truth.abs().max())
        yield Row(what=f"{what}: largest difference", value=off, unit="of max", goal=_OFF, better="lower")
    yield Row(
        what="packed",
        value=found["packed"][1] * 1e3,
        unit="ms",
        note=f"forward and backward of {sum(lengths):,} tokens",
    )
    yield Row(what="each by itself", value=found["alone"][1] * 1e3, unit="ms")


def _passes(
    way: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...], scale: Scale
) -> tuple[list[torch.Tensor], float]:
    def once() -> list[torch.Tensor]:
        out = way()
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        if scale.device.type == "cuda":
            torch.cuda.synchronize(scale.device)
        return [each.detach().float() for each in (out, *grads)]

    found = once()
    return found, min(seconds(once) for _ in range(3))
