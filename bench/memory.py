"""What a rank takes of its GPU: the closed form that refuses a run, against the learner's own code without memory.

Four learners as they are meant for GPUs of 80 GB, at their full depth, and one that keeps all activations; none of it
on a GPU. The two share no code: the one counts, the other runs the learner's passes on tensors that have no memory.
With `quick` models of four layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import transformers

from bench.measure import Say
from bench.memory_cases import CASES, Case, model_config
from bench.memory_run import run
from bench.report import Bar, Fact, Line
from streamrl.learner.model.lora import place_adapters
from streamrl.learner.model.memory import Plan, Sizes, plan

_WITHIN = 10.0  # %
_GPU = 80.0  # GB


def bench(*, quick: bool, say: Say) -> list[Line]:
    return [line for name, case in CASES.items() if (case.layers is not None) == quick for line in _of(name, case, say)]


def planned(case: Case) -> Plan:
    return plan(sizes_of(case), case.config)


def sizes_of(case: Case) -> Sizes:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(case.size, case.layers))
        if case.config.model.lora is not None:
            place_adapters(model, case.config.model.lora)
    return Sizes.of(model)


def _of(name: str, case: Case, say: Say) -> Iterator[Line]:
    say(name)
    try:
        measured, ours = run(case), planned(case)
    finally:
        if dist.is_initialized():  # with as many ranks as this case has
            dist.destroy_process_group()
    most = max(measured.values())
    off = 100 * abs(ours.peak / most - 1)
    yield Bar(name=f"{name}: off by", value=off, unit="%", goal=_WITHIN, better="lower")
    if case.layers is None:
        yield Bar(name=f"{name}: with headroom", value=ours.needed / 1e9, unit="GB", goal=_GPU, better="lower")
    yield Fact(name=f"{name}: measured", value=most / 1e9, unit="GB")
    yield Fact(name=f"{name}: planned", value=ours.peak / 1e9, unit="GB")
    headroom = (ours.needed - ours.peak) / 1e9
    yield Fact(name=f"{name}: headroom for allocator, libraries and NCCL", value=headroom, unit="GB")
