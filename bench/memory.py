"""A rank's GPU memory: the planner's closed form, which rejects runs, against the learner's own code without memory.

Learners as intended for 80 GB GPUs, at full depth, and one without activation checkpointing; none on a GPU. The two
share no code: one adds up sizes, the other runs the learner's passes on tensors without memory. With `quick`, models of
four layers.

The activations saved by sharing samples among ranks are measured on four layers of 8B: the peak of a pass over 128k
tokens minus that of one over 64, on each of four ranks that share samples, and on one of four that holds them whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import transformers

from bench.measure import Say
from bench.memory_cases import CASES, Case, model_config
from bench.memory_run import run
from bench.report import Bar, Fact, Line
from streamrl.learner.model.lora import place_adapters
from streamrl.learner.planning.memory import MemoryEstimate, plan
from streamrl.learner.planning.sizes import Sizes

_WITHIN = 10.0  # %
_GPU = 80.0  # GB
_SHARED_AMONG = 4
_OF_WHOLE = 0.3


def bench(*, quick: bool, say: Say) -> list[Line]:
    lines = [
        line for name, case in CASES.items() if (case.layers is not None) == quick for line in _of(name, case, say)
    ]
    return [*lines, *_of_sharing(say)]


def planned(case: Case) -> MemoryEstimate:
    return plan(sizes_of(case), case.config)


def sizes_of(case: Case) -> Sizes:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(case.size, case.layers))
        if case.config.model.lora is not None:
            place_adapters(model, case.config.model.lora)
    return Sizes.of(model)


def _of(name: str, case: Case, say: Say) -> Iterator[Line]:
    say(name)
    measured, ours = counted(case), planned(case)
    most = max(measured.values())
    off = 100 * abs(ours.peak / most - 1)
    yield Bar(name=f"{name}: off by", value=off, unit="%", goal=_WITHIN, better="lower")
    if case.layers is None:
        yield Bar(name=f"{name}: with headroom", value=ours.needed / 1e9, unit="GB", goal=_GPU, better="lower")
    yield Fact(name=f"{name}: measured", value=most / 1e9, unit="GB")
    yield Fact(name=f"{name}: planned", value=ours.peak / 1e9, unit="GB")
    headroom = (ours.needed - ours.peak) / 1e9
    yield Fact(name=f"{name}: headroom for allocator, libraries and NCCL", value=headroom, unit="GB")


def _of_sharing(say: Say) -> Iterator[Line]:
    for checkpointing in (True, False):
        what_is_kept = "inputs of layers kept" if checkpointing else "all activations kept"
        say(f"context over {_SHARED_AMONG}, {what_is_kept}")
        whole, shared = (_activations(context, checkpointing=checkpointing) for context in (1, _SHARED_AMONG))
        name = f"context over {_SHARED_AMONG}, 128k tokens, {what_is_kept}"
        yield Bar(
            name=f"{name}: activations of a rank that shares them, of one with all",
            value=shared / whole,
            unit="x",
            goal=_OF_WHOLE,
            better="lower",
        )
        yield Fact(name=f"{name}: activations of one that shares them", value=shared / 1e9, unit="GB")
        yield Fact(name=f"{name}: activations of one with all", value=whole / 1e9, unit="GB")


def _activations(context: int, *, checkpointing: bool) -> int:
    """Return the part of a pass's peak that depends on its tokens."""
    few = Case(
        size="8B",
        ranks=_SHARED_AMONG,
        layers=4,
        tokens=64,
        checkpointing=checkpointing,
        context=context,
        reference=False,
    )
    least, most = (counted(case) for case in (few, replace(few, tokens=131_072)))
    return max(most["forward"], most["backward"]) - max(least["forward"], least["backward"])


def counted(case: Case) -> dict[str, int]:
    try:
        return run(case)
    finally:
        if dist.is_initialized():  # with the rank count of this case
            dist.destroy_process_group()
