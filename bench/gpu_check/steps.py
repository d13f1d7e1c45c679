"""The learner's step on random models: GPU utilisation, peak memory against the planner's, where the time goes.

MFU   useful FLOPs / seconds / the vendor's figure for dense bf16. Useful: 6 per layer weight and token, 6 per head
      weight and trained token, 12 x layers x heads x head_dim per token and token that it attends to; recomputation by
      checkpointing counts only once
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from bench.gpu_check.rows import Row, Scale
from bench.gpu_check.shares import shares
from bench.learner_gpu import SIZES
from bench.long_tailed import Lengths, Size, make_config, make_groups, num_tokens
from bench.measure import seconds
from bench.stepping import Stepping
from streamrl.config import schema
from streamrl.learner.metrics.gpu import peak_flops
from streamrl.learner.planning.memory import MemoryEstimate, plan
from streamrl.learner.planning.sizes import Sizes

_7B = Size(vocabulary=152_064, hidden=3584, intermediate=18_944, layers=4, heads=28, kv_heads=4)
_TINY = Size(vocabulary=97, hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)
_LENGTHS = Lengths(prompt=(128, 384), median=700, spread=0.9, longest=8192)
_SHORT = Lengths(prompt=(3, 6), median=6, spread=0.9, longest=40)
_ROUNDS = 3
_OFF = 0.1  # tolerance for the planner, as for tensors without memory


class _Case(NamedTuple):
    size: Size
    checkpointing: bool
    mfu: float | None = None  # goal
    compiled: bool = True


CASES = {
    "1.5B, all activations": _Case(SIZES["1.5B"], checkpointing=False, mfu=0.45),
    "1.5B, checkpointing": _Case(SIZES["1.5B"], checkpointing=True, mfu=0.40),
    "1.5B, all activations, not compiled": _Case(SIZES["1.5B"], checkpointing=False, compiled=False),
    "1.5B, checkpointing, not compiled": _Case(SIZES["1.5B"], checkpointing=True, compiled=False),
    "7B-shaped, 4 layers": _Case(_7B, checkpointing=True),
    "7B-shaped, 8 layers": _Case(replace(_7B, layers=8), checkpointing=True),
}


def check(scale: Scale) -> Iterator[Row]:
    if scale.is_reduced:
        yield from _of("tiny", _Case(_TINY, checkpointing=True, compiled=False), scale)
        return
    for name, case in CASES.items():
        gc.collect()  # FSDP's modules are in cycles: the last case's weights would count as this one's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(scale.device)  # the last case's peak, set again by its profiled step
        yield from _of(name, case, scale)


def _of(name: str, case: _Case, scale: Scale) -> Iterator[Row]:
    config, lengths = _config(case, scale), _SHORT if scale.is_reduced else _LENGTHS
    planned = _planned(case.size, config, lengths)
    yield Row(what=f"{name}: planned peak", value=planned.peak / 1e9, unit="GB")
    room = torch.cuda.get_device_properties(scale.device).total_memory if not scale.is_reduced else planned.needed
    if planned.needed > room:
        yield Row(
            what=f"{name}: not run, GPU has", value=room / 1e9, unit="GB", note=f"{planned.needed / 1e9:.1f} wanted"
        )
        return
    stepping = Stepping(case.size, config, max_length=lengths.longest + lengths.prompt[1], device=scale.device)
    groups = make_groups(2 if scale.is_reduced else 16, num_samples=8, lengths=lengths, vocabulary=case.size.vocabulary)
    stepping.learn(groups)
    stepping.learn(groups)  # AdamW allocates its moments
    took = statistics.median(seconds(lambda: stepping.learn(groups)) for _ in range(_ROUNDS))
    flops, peak = stepping.flops(groups) / took, peak_flops(scale.device)
    note = f"{num_tokens(groups):,} tokens in {took:.3g} s; layers computed {'twice' if case.checkpointing else 'once'}"
    yield Row(what=f"{name}: useful", value=flops / 1e12, unit="TFLOP/s", note=note)
    if peak is not None:
        yield Row(
            what=f"{name}: MFU",
            value=flops / peak,
            unit="",
            goal=case.mfu,
            note=f"peak {peak / 1e12:g} TFLOP/s dense bf16",
        )
    if not scale.is_reduced:  # before the profiler, whose buffers are on the GPU too
        measured = torch.cuda.max_memory_allocated(scale.device)
        yield Row(what=f"{name}: peak", value=measured / 1e9, unit="GB")
        off = abs(planned.peak / measured - 1)
        yield Row(what=f"{name}: planner is off by", value=off, unit="", goal=_OFF, better="lower")
    yield from shares(name, lambda: stepping.learn(groups), scale)


def _config(case: _Case, scale: Scale) -> schema.Config:
    config = make_config(micro_batch_tokens=64 if scale.is_reduced else 16_384, dtype="bfloat16")
    ways = {"gradient_checkpointing": case.checkpointing, "compile": case.compiled}
    return config.model_copy(update={"model": config.model.model_copy(update=ways)})


def _planned(size: Size, config: schema.Config, lengths: Lengths) -> MemoryEstimate:
    return plan(Sizes.of(size.model(max_length=lengths.longest, device=torch.device("meta"))), config)
