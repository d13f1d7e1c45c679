"""Deltas that go into vLLM's live weights, model by model, each in a forked process: vLLM is imported once.

    python -m tests.integration.in_place OUTPUT CASE...

A real mirror follows a chain of versions; the engine takes each in its place. Then its log-probs and what is read back
are compared with those of a load of all weights. One JSON line for each case.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from bench.proofs_engine import EngineHere, import_vllm
from streamrl.protocol.weights.changes import Changed, Elements
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.workers.engines.base import Load
from tests.tiny_families import make_family
from tests.tiny_models import make_model
from tests.weights_world import RUN_UID, State, World

IDS = np.random.default_rng(3).integers(3, 45, 60, dtype=np.int32)
NUM_DELTAS = 20
_SHARE, _LARGE = 0.01, 0.2  # of a tensor's elements that a delta changes
_FORK = multiprocessing.get_context("fork")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str  # an architecture of `tiny_models`, a family of `tiny_families` or a folder
    tied: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @property
    def one_bit(self) -> str:
        """A tensor single elements of which are written; in float32 linear layers are made anew."""
        return "down_proj" if self.dtype == "bfloat16" else "embed_tokens"


CASES: Mapping[str, Case] = {
    "qwen2-tied": Case(model="qwen2"),
    "qwen2-untied": Case(model="qwen2", tied=False),
    "llama-tied": Case(model="llama"),
    "llama-untied": Case(model="llama", tied=False),
    "qwen2-tied-float32": Case(model="qwen2", dtype="float32"),
    "llama-untied-float32": Case(model="llama", tied=False, dtype="float32"),
    "qwen3_moe": Case(model="qwen3_moe"),
}


class Chain:
    """A learner that changes a few elements of each tensor, and many of one, and the mirror that follows it."""

    def __init__(self, model: Path, folder: Path, dtype: Literal["bfloat16", "float32"]) -> None:
        made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        bits, wide = (torch.int16, np.uint16) if dtype == "bfloat16" else (torch.int32, np.uint32)
        self.state: State = {
            name: p.detach().view(bits).numpy().view(wide).ravel() for name, p in made.named_parameters()
        }
        tensors = [TensorMeta(name=n, dtype=dtype, shape=tuple(p.shape)) for n, p in made.named_parameters()]
        self.world = World(MemoryStore(), tensors=tensors)
        self.mirror = Mirror(folder, run_uid=RUN_UID)
        self._rng = np.random.default_rng(0)
        self.follow()

    def follow(self) -> Manifest:
        manifest = self.world.publish(self.state)
        self.mirror.apply(manifest, self.world.store)
        return manifest

    def next(self) -> tuple[Manifest, Changed]:
        since = self.mirror.version
        self.mirror.loaded()
        large = self._rng.choice(list(self.state))
        self.state = {name: self._moved(bits, _LARGE if name == large else _SHARE) for name, bits in self.state.items()}
        manifest = self.follow()
        changed = self.mirror.changed(since=since)
        assert changed is not None, "it follows by deltas alone"
        return manifest, changed

    def _moved(self, bits: Any, share: float) -> Any:
        """By steps that are seen in log-probs, and all of them finite. Zeros, of a padding row, stay: beside them are
        numbers so small that kernels take them for zeros."""
        which = (self._rng.random(len(bits)) < share) & (bits != 0)
        flip = bits.dtype.type(1 << (6 if bits.itemsize == 2 else 22))  # the mantissa's highest
        return np.where(which, bits ^ flip, bits)


async def run(case: Case, folder: Path) -> dict[str, Any]:
    model = _model(case, folder / "model")
    chain = Chain(model, folder / "mirror", case.dtype)
    engine = EngineHere(model, case.dtype)
    path = chain.mirror.path
    await engine.load_decoy(path)
    await engine.load(Load(weights=path, version=chain.mirror.version, step=0))
    before = await engine.logprobs(IDS)
    reasons = set()
    for _ in range(NUM_DELTAS):
        manifest, changed = chain.next()
        await engine.load(Load(weights=path, version=manifest.version, step=manifest.step, changed=changed))
        reasons.add(engine.reason)
    found = await engine.read_back(path, number=1, num_parts=1)
    row = {"reasons": sorted(reasons), "num_read": found.num_read, "wrong": found.wrong, "unreadable": found.unreadable}
    if reasons == {""}:
        in_place = await engine.logprobs(IDS)
        await engine.load(Load(weights=path, version=chain.mirror.version, step=0))
        whole = await engine.logprobs(IDS)
        row |= {"off": float(np.abs(in_place - whole).max()), "moved": float(np.abs(whole - before).max())}
        if any(".down_proj." in name for name in chain.state):
            row |= await _spoilt(case, engine, chain)
    return row


async def _spoilt(case: Case, engine: EngineHere, chain: Chain) -> dict[str, Any]:
    """What reading back finds of patches that are not what they should be, and what becomes of one that fails."""
    row: dict[str, Any] = {}
    for what, tensor in (("left behind", "down_proj"), ("one bit", case.one_bit)):
        manifest, changed = chain.next()
        name = next(name for name in changed.elements if f".{tensor}." in name)
        spoilt = dict(changed.elements)
        if what == "left behind":
            del spoilt[name]
        else:
            bits = spoilt[name].bits.copy()
            bits[0] ^= bits.dtype.type(1)
            spoilt[name] = Elements(positions=spoilt[name].positions, bits=bits)
        await engine.load(
            Load(weights=chain.mirror.path, version=manifest.version, step=0, changed=replace(changed, elements=spoilt))
        )
        row[what] = (await engine.read_back(chain.mirror.path, number=1, num_parts=1)).wrong
        await engine.load(Load(weights=chain.mirror.path, version=manifest.version, step=0))
    manifest, changed = chain.next()
    some = next(iter(changed.elements.values()))
    beyond = Elements(positions=np.array([1 << 40]), bits=some.bits[:1])
    half = replace(changed, elements={**changed.elements, "model.norm.weight": beyond})
    row["failed"] = await _error_of(engine, chain.mirror.path, manifest, half)
    row["after it failed"] = await _error_of(engine, chain.mirror.path, manifest, changed)
    return row


async def _error_of(engine: EngineHere, path: Path, manifest: Manifest, changed: Changed) -> str:
    try:
        await engine.load(Load(weights=path, version=manifest.version, step=0, changed=changed))
    except (IndexError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _model(case: Case, folder: Path) -> Path:
    if Path(case.model).is_dir():
        folder.symlink_to(case.model)
        return folder
    if case.model in ("qwen2", "llama"):
        dtype = getattr(torch, case.dtype)
        return make_model(folder, architecture=case.model, tied=case.tied, dtype=dtype)  # type: ignore[arg-type]
    return make_family(folder, case.model, seed=0)


def _in_process(name: str, told: Connection) -> None:
    case = CASES.get(name) or Case(model=name)
    with tempfile.TemporaryDirectory() as folder:
        row = {"case": name, **asyncio.run(run(case, Path(folder)))}
    told.send(row)  # what hears it kills this process


def main(output: Path, names: list[str]) -> None:
    import_vllm()
    with output.open("w") as file:
        for name in names:
            receive, send = _FORK.Pipe(duplex=False)
            child = _FORK.Process(target=_in_process, args=(name, send))
            child.start()
            send.close()
            try:
                row = receive.recv() if receive.poll(_TIMEOUT_S) else {"case": name, "died": "it takes too long"}
            except EOFError:
                row = {"case": name, "died": "see above"}
            child.kill()
            child.join()
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
