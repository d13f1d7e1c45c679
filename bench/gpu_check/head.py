"""The passes over logits that a GPU compiles against plain operations in place: as exact, and how much faster?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import torch

from bench.gpu_check.rows import Row, Scale
from bench.measure import seconds
from streamrl.learner.model import logprobs
from streamrl.learner.model.logits import Functions, Head, InPlace, Passes, passes_on

_OFF = 0.01  # relative to the largest value: a gradient in bf16 is rounded by 0.004
_ROUNDS = 3


class _Case(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    early: torch.Tensor


def check(scale: Scale) -> Iterator[Row]:
    tokens, vocabulary, width = (40, 97, 16) if scale.is_reduced else (16_384, 151_936, 1536)
    torch.manual_seed(0)
    case = _Case(
        hidden=torch.randn(tokens, width, device=scale.device, dtype=torch.bfloat16, requires_grad=True),
        weight=(torch.randn(vocabulary, width, device=scale.device) / width**0.5).bfloat16().requires_grad_(),
        targets=torch.randint(vocabulary, (tokens,), device=scale.device),
        early=torch.arange(tokens, device=scale.device) % 2 == 0,
    )
    head = Head(temperature=0.8, end_ids=(1, 2), compute_dtype=torch.bfloat16)
    for name, one in {"": head, "soft cap, entropy: ": replace(head, soft_cap=30.0)}.items():
        ways = {"compiled": Functions() if scale.is_reduced else passes_on(scale.device), "in place": InPlace()}
        found = {way: _passes(case, one, passes, scale, entropy_learns=bool(name)) for way, passes in ways.items()}
        for what, ours, theirs in zip(
            ("log-probs", "entropy", "d hidden", "d head"), *(each[0] for each in found.values()), strict=True
        ):
            off = float((ours - theirs).abs().max() / theirs.abs().max())
            yield Row(what=f"{name}{what}: off", value=off, unit="of max", goal=_OFF, better="lower")
        for way, (_, took_s, peak) in found.items():
            note = "" if scale.is_reduced else f"{peak / 1e9:.2f} GB at most"
            yield Row(what=f"{name}{way}", value=took_s * 1e3, unit="ms", note=note)


def _passes(
    case: _Case, head: Head, passes: Passes, scale: Scale, *, entropy_learns: bool
) -> tuple[list[torch.Tensor], float, int]:
    """What forward and backward pass give, the seconds that they take, and the bytes that they need."""
    is_gpu = scale.device.type == "cuda"

    def once() -> list[torch.Tensor]:
        logp, entropy = logprobs.token_logprobs(*case, head, entropy_learns=entropy_learns)
        loss = logp.mean() - (0.1 * entropy.mean() if entropy_learns else 0)
        grads = torch.autograd.grad(loss, (case.hidden, case.weight))
        if is_gpu:
            torch.cuda.synchronize(scale.device)
        return [each.detach().float() for each in (logp, entropy, *grads)]

    with mock.patch.object(logprobs, "passes_on", return_value=passes):
        found = once()
        before = 0
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(scale.device)
            before = torch.cuda.memory_allocated(scale.device)
        took_s = min(seconds(once) for _ in range(_ROUNDS))
        peak = torch.cuda.max_memory_allocated(scale.device) - before if is_gpu else 0
    return found, took_s, peak
