"""Runs model families through the worker's proofs, at all depths and dtypes, each in a forked process.

For each depth and dtype a vLLM engine loads a decoy and six versions, each checked as in a worker, canary included;
then faults in each kind of tensor, which read-back must find; and, at one depth, the faults that the canary alone would
find. Finished cases are skipped in the next run; failed ones are tried again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.measure import Say
from bench.proofs_engine import EngineHere, import_vllm
from bench.proofs_faults import Tensors, faults, place, served, updated
from bench.proofs_models import DEPTHS, DTYPES, VOCABULARY, write_model
from bench.resume import Done
from streamrl.config.engine_args import QUANTIZED
from streamrl.errors import LoadRejected
from streamrl.learner.publishing.host_copy import cast_digests
from streamrl.protocol.weights.manifest import Manifest
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import Load
from streamrl.workers.engines.model import read_model
from streamrl.workers.proofs.proving import Prover

_FORK = multiprocessing.get_context("fork")  # so that vLLM is imported once
_TIMEOUT_S = 300.0
_NUM_VERSIONS = 6
_ALONE_AT = 12  # depth at which the canary is tested alone
_NUM_TOKENS = 64

Row = dict[str, Any]


@dataclass(slots=True)
class _Case:
    """One depth and dtype of a family."""

    folder: Path
    dtype: torch.dtype
    engine: EngineHere
    prover: Prover
    progress: Progress
    result: dict[str, Any]
    token_ids: tuple[int, ...]
    versions: list[Tensors] = field(default_factory=list)  # as served, oldest first
    masters: list[Tensors] = field(default_factory=list)

    def manifest(self) -> Manifest:
        return Manifest(
            version=(1 << 32) + len(self.versions),
            base=0,
            step=len(self.versions),
            run_uid="bench",
            tensors=(),
            shards=(),
            canary_ids=self.token_ids,
        )


async def _try(family: str, depth: int, served_in: str, folder: Path) -> dict[str, Any]:
    form = next((form for form in QUANTIZED if form == served_in), None)
    dtype = served_in if form is None else "bfloat16"
    model = write_model(family, depth, dtype, folder / "model")
    facts = read_model(str(model), trust_remote_code=False)
    progress = Progress(part="worker/0", role="worker")
    prover = Prover(
        model=facts,
        dtype=dtype,
        form=form,
        progress=progress,
        clock=lambda: 0.0,  # makes a canary take no time, so that each version gets one
    )
    ids = np.random.default_rng(depth).integers(2, VOCABULARY, _NUM_TOKENS)
    case = _Case(
        folder=folder,
        dtype=getattr(torch, dtype),
        engine=EngineHere(model, dtype, form),
        prover=prover,
        progress=progress,
        result={"family": family, "depth": depth, "dtype": served_in},
        token_ids=tuple(ids.tolist()),
    )
    case.masters.append({name: t.float() for name, t in load_file(model / "mirror.safetensors").items()})
    await _serve_versions(case)
    await _find_faults(case)
    if depth == _ALONE_AT:
        await _canary_alone(case)
    _stale_casts(case)
    return case.result


async def _serve_versions(case: _Case) -> None:
    """Count false alarms, and measure the engine's distance from the truth, in roundings."""
    mirror, ratios, alarms = case.folder / "mirror.safetensors", [], []
    for number in range(_NUM_VERSIONS):
        if number:
            case.masters.append(updated(case.masters[-1], seed=number))
        case.versions.append(served(case.masters[-1], case.dtype))
        save_file(dict(case.versions[-1]), mirror)
        if not number:
            await case.prover.rehearse(case.engine, mirror)
        await case.engine.load(Load(weights=mirror, version=1 + number, step=number))
        try:
            await case.prover.check(case.engine, mirror, case.manifest())
        except LoadRejected as error:
            alarms.append(str(error))
        detail = case.progress.report().detail
        ratios.append(float(detail["engine_off"]) / float(detail["rounding"]))
        case.result |= {"off": float(detail["engine_off"]), "rounding": float(detail["rounding"])}
    found = await case.engine.read_back(mirror, number=0, num_parts=1)
    case.result |= {
        "checks": _NUM_VERSIONS,
        "alarms": alarms,
        "worst_ratio": max(ratios),
        "read": found.num_read,
        "unreadable": list(found.unreadable),
    }


async def _find_faults(case: _Case) -> None:
    """Load each fault for real, then read back against the mirror, as at an engine's first load."""
    mirror, spoilt = case.folder / "mirror.safetensors", case.folder / "spoilt.safetensors"
    rows = []
    for number, fault in enumerate(faults(case.versions[-1], case.versions[-2], case.versions[0])):
        save_file({**case.versions[-1], **fault.tensors}, spoilt)
        await case.engine.load(Load(weights=spoilt, version=100 + number, step=0))
        wrong = (await case.engine.read_back(mirror, number=number, num_parts=1)).wrong
        missed = {place(name) for name in fault.tensors} - {place(name) for name in wrong}
        rows.append({"fault": fault.name, "kind": fault.kind, "num": len(fault.tensors), "missed": len(missed)})
    case.result["faults"] = rows


async def _canary_alone(case: _Case) -> None:
    """For one tensor of each kind, in the middle layer: would the canary have found the fault?"""
    mirror, spoilt = case.folder / "mirror.safetensors", case.folder / "spoilt.safetensors"
    truth = case.prover._reference.judge(mirror, case.token_ids)
    rows = []
    for number, fault in enumerate(faults(case.versions[-1], case.versions[-2], case.versions[0])):
        name = sorted(fault.tensors)[len(fault.tensors) // 2]
        save_file({**case.versions[-1], name: fault.tensors[name]}, spoilt)
        await case.engine.load(Load(weights=spoilt, version=1000 + number, step=0))
        answered = await case.engine.logprobs(np.asarray(case.token_ids, dtype=np.int32))
        off = float(np.abs(answered - truth.truth).mean())
        rows.append({"fault": fault.name, "kind": fault.kind, "off": off})
    case.result["alone"] = rows


def _stale_casts(case: _Case) -> None:
    """Compare a cast that is one step old, of each tensor in turn, with the digests of this step's masters."""
    dtype = str(case.dtype).removeprefix("torch.")
    was, is_ = (cast_digests(_module(masters), dtype) for masters in case.masters[-2:])
    differing = [
        name for name in case.versions[-1] if not torch.equal(case.versions[-1][name], case.versions[-2][name])
    ]
    found = [name for name in differing if any(was[key] != is_[key] for key in is_ if key[0] == name.replace(".", "/"))]
    case.result["casts"] = {"num": len(differing), "missed": len(differing) - len(found)}


def _module(masters: Tensors) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in masters.items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))
    return module


def try_families(names: Iterable[str], done: Done, *, quick: bool, say: Say) -> list[Row]:
    """Return all rows, including kept ones; the row of a failed case contains the error."""
    rows: list[Row] = []
    import_vllm()
    torch.set_num_threads(1)
    for family, depth, dtype in product(names, DEPTHS[:2] if quick else DEPTHS, DTYPES):
        name = f"{family}, {depth} layers, {dtype}"
        if name in done:
            rows.append(dict(done[name]))
            continue
        say(name)
        rows.append(_in_a_process(family, depth, dtype))
        if "failed" not in rows[-1]:
            done.add(name, rows[-1])
    return rows


def _in_a_process(family: str, depth: int, dtype: str) -> Row:
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(family, depth, dtype, sender))
    process.start()
    sender.close()
    failed = {"family": family, "depth": depth, "dtype": dtype}
    try:
        row: Row = receiver.recv() if receiver.poll(_TIMEOUT_S) else {**failed, "failed": f"{_TIMEOUT_S:g} s passed"}
    except EOFError:
        row = {**failed, "failed": "the process died"}
    process.kill()
    process.join()
    return row


def _work(family: str, depth: int, dtype: str, sender: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = asyncio.run(_try(family, depth, dtype, Path(folder)))
        except Exception as error:  # noqa: BLE001 - vLLM's errors have no common base; the row contains the error
            row = {"family": family, "depth": depth, "dtype": dtype, "failed": f"{type(error).__name__}: {error}"[:500]}
    sender.send(row)
