"""Publishing adapters only, against the same run publishing all weights: bytes, and CPU time on both sides.

    train ─► begin: what the loop waits for ─► stored ─► a mirror applies it: patches, or merges

Each version in the mirror is compared bit by bit with the learner's own merge. Times are CPU times over all threads, so
other load on the machine matters little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from bench.learner_side import Announced, LearnerSide
from bench.measure import Say
from bench.report import Bar, Fact, Line
from bench.training import make_model
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.learner.process.background import BackgroundThreadDouble
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.pretrained import PretrainedFiles
from streamrl.protocol.weights.stores import MemoryStore

_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LORA = schema.Lora(rank=32, alpha=64.0, targets=_ALL)
_TRAINED = {"adapters": (_LORA, 2e-4), "all weights": (None, 1e-6)}  # with the learning rates that suit them
_NUM_TOKENS = 256


def bench(*, quick: bool, say: Say) -> list[Line]:
    lines: list[Line] = []
    with scratch_folder(in_memory=True) as folder:
        make_model(quick=quick).save_pretrained(folder / "model")
        for name, (lora, lr) in _TRAINED.items():
            say(f"{name}: versions of them")
            lines += _publish(folder, name, lora, lr=lr, num_versions=3 if quick else 8)
    return lines


def _publish(folder: Path, name: str, lora: schema.Lora | None, *, lr: float, num_versions: int) -> list[Line]:
    announced, store = Announced(), MemoryStore()
    learner = LearnerSide(
        _config(folder / "model", lora),
        store=store,
        announcer=announced,
        background=BackgroundThreadDouble(),
        num_tokens=_NUM_TOKENS,
        lr=lr,
    )
    files = PretrainedFiles([folder / "model" / "model.safetensors"], name="bench")
    mirror, num_wrong = Mirror(folder / name, pretrained=files), 0
    begun_s, taken_s = [], []
    for _ in range(num_versions + 1):
        learner.train()
        begun_s.append(_processor_s(learner.begin))
        learner.finish()
        taken_s.append(_processor_s(lambda: mirror.apply(announced.manifests[-1], store)))
        num_wrong += _num_wrong(mirror, learner)
    mirror.close()
    first, *later = (manifest.num_bytes for manifest in announced.manifests)
    return [
        Bar(name=f"{name}: tensors served unlike the learner's", value=num_wrong, unit="", goal=0, better="lower"),
        Fact(name=f"{name}: first version", value=first / 1e6, unit="MB"),
        Fact(name=f"{name}: version", value=float(np.median(later)) / 1e6, unit="MB"),
        Fact(name=f"{name}: publish, encoding too", value=float(np.median(begun_s[1:])), unit="s"),
        Fact(name=f"{name}: a mirror takes it", value=float(np.median(taken_s[1:])), unit="s"),
    ]


def _num_wrong(mirror: Mirror, learner: LearnerSide) -> int:
    served, truth = safetensors.torch.load_file(mirror.path), learner.served()
    assert served.keys() == truth.keys()
    return sum(not torch.equal(served[name], truth[name]) for name in truth)


def _processor_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _config(model: Path, lora: schema.Lora | None) -> schema.Config:
    return schema.Config(
        name="bench",
        model=schema.Model(path=str(model), dtype="float32", lora=lora),
        data=schema.Data(train="unused.jsonl"),
        rewards={"unused": schema.FunctionReward(type="function", target="unused")},
    )
