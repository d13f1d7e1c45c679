"""What a rank takes of its GPU: the closed form that refuses a run, against the learner's own code without memory.

Four learners as they are meant for GPUs of 80 GB, and one that keeps all activations; none of it on a GPU. With `quick`
models of four layers, which the closed form knows no better.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from bench.measure import Say
from bench.memory_cases import CASES, Case, model_config
from bench.report import Bar, Fact, Line
from streamrl.learner.model.lora import place_adapters
from streamrl.learner.model.memory import Plan, Sizes, plan

_WITHIN = 10.0  # %


def bench(*, quick: bool, say: Say) -> list[Line]:
    return [line for name, case in CASES.items() if (case.layers is not None) == quick for line in _of(name, case, say)]


def planned(case: Case) -> Plan:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config(case.size, case.layers))
        if case.config.model.lora is not None:
            place_adapters(model, case.config.model.lora)
    return plan(Sizes.of(model), case.config)


def _of(name: str, case: Case, say: Say) -> Iterator[Line]:
    say(name)
    done = subprocess.run(
        [sys.executable, "-m", "bench.memory_run", name],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    measured, ours = json.loads(done.stdout.splitlines()[-1]), planned(case)
    most = max(measured.values())
    off = 100 * abs(ours.peak / most - 1)
    yield Bar(name=f"{name}: off by", value=off, unit="%", goal=_WITHIN, better="lower")
    yield Fact(name=f"{name}: measured", value=most / 1e9, unit="GB")
    yield Fact(name=f"{name}: planned", value=ours.peak / 1e9, unit="GB")
    yield Fact(name=f"{name}: with headroom", value=ours.needed / 1e9, unit="GB")
