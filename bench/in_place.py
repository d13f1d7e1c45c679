"""Writing a delta in place against vLLM's own reload of all weights, inside the engine's process.

    mirror ─► patch file ─► elements written into our packed layout        } interleaved with
                        └─► layers rebuilt in vLLM's own layout (oneDNN)   } vLLM's own reload from memory

136M parameters in bf16, with about 1 % of elements changed in all tensors. Each of the two has its own engine and
process; messages and the worker's work beside generation are left out (`serving` includes both).
"""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.measure import Say, environment_as_it_was
from bench.publishing import Publishing
from bench.report import Bar, Fact, Line
from streamrl.held_folders import scratch_folder
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.workers.engines.base import Load

_SHARE = 0.01  # fraction of elements that change
_NUM_ROUNDS = 7
_SPAWN = multiprocessing.get_context("spawn")
_GOALS = {"elements in their places": 0.2, "layers made anew": 0.6}


def bench_in_place(*, say: Say) -> list[Line]:
    lines: list[Line] = []
    with scratch_folder(in_memory=True) as folder, environment_as_it_was():
        _save(folder / "model")
        for name, goal in _GOALS.items():
            say(f"a delta of 136M parameters: {name}")
            with _SPAWN.Pool(1) as pool:
                patch_s, own_s = pool.apply(_measure, (folder, name))
            ratio = median(one / other for one, other in zip(patch_s, own_s, strict=True))
            lines += [
                Bar(name=f"{name} / own reload", value=ratio, unit="x", goal=goal, better="lower"),
                Fact(name=f"{name}: taken", value=median(patch_s), unit="s"),
                Fact(name=f"{name}: vLLM's own reload", value=median(own_s), unit="s"),
            ]
    return lines


def _save(folder: Path) -> None:
    from bench.training import make_model  # torch
    from bench.worker_model import make_tokenizer

    make_model(quick=False).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def _measure(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Run in a process of its own."""
    from bench.proofs_engine import import_vllm

    import_vllm()
    return asyncio.run(_rounds(folder, as_vllm_packs=name == "layers made anew"))


async def _rounds(folder: Path, *, as_vllm_packs: bool) -> tuple[list[float], list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    from bench.in_place_engine import TimedEngine, leave_packing_to_vllm
    from bench.training import bits_of, tensors_of

    torch.set_num_threads(1)
    if as_vllm_packs:
        leave_packing_to_vllm()
    # First: vLLM's start looks into every loaded module, and fails at those that the compiled kernels bring.
    engine = TimedEngine(folder / "model", "bfloat16")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    state, publishing = bits_of(model), Publishing(tensors_of(model), MemoryStore())
    mirror = Mirror(folder / "mirror")
    mirror.apply(publishing.publish(state, anchor=True), publishing.store)
    await engine.load(Load(weights=mirror.path, version=mirror.version, step=0))
    rng = np.random.default_rng(0)
    patch_s, own_s = [], []
    for _ in range(1 + _NUM_ROUNDS):
        mirror.loaded()
        since = mirror.version
        state = {tensor: _moved(bits, rng) for tensor, bits in state.items()}
        mirror.apply(publishing.publish(state), publishing.store)
        await engine.load(
            Load(weights=mirror.path, version=mirror.version, step=0, changed=mirror.changed(since=since))
        )
        assert not engine.reason, engine.reason
        patch_s.append(engine.took_s)
        own_s.append(engine.own_reload(mirror.path))
    mirror.close()
    return patch_s[1:], own_s[1:]  # the first round touches memory for the first time


def _moved(bits: Any, rng: np.random.Generator) -> Any:
    moved = bits.copy()
    moved[rng.integers(0, len(bits), rng.poisson(_SHARE * len(bits)))] ^= 1
    return moved
