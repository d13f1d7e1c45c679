"""The effect of stale samples on a pretrained model: SmolLM2-135M on the demo's sums, on real vLLM (`make staleness
ARGS=--pretrained`).

    cells (seed x loss x lag, saved in runs/bench as they finish) ─► accuracy on held-out sums, pair by pair ─► bars

A cell takes twenty minutes on two idle cores, and on a GPU all cells run at once; an interrupted bench resumes with the
missing ones. Nothing is timed, so it may run beside other load. Errors are those of pairs: both cells of a pair answer
the same held-out sums, pooled over the seeds. They measure the uncertainty of the answers, and of runs only what two
seeds can show.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import xxhash

from bench.measure import Say
from bench.proofs_pretrained import MODEL
from bench.report import Bar, Fact, Line
from bench.resume import Done
from bench.stale_trial import CORES, Task, Trainer, Trial, config_of
from bench.staleness import UNCORRECTED, Estimate
from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.held_folders import scratch_folder
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.engine import VllmEngine

_DEFAULT = schema.Algorithm().loss
_CELLS = ((_DEFAULT, 0), (_DEFAULT, 8), (_DEFAULT, 32), (UNCORRECTED, 32))
_TOLERATED = {8: 0.03, 32: 0.06}  # of on-policy accuracy, or two standard errors if larger
_QUICK = Task(num_steps=2, num_held_out=16)
_OF = (Path(__file__), Path(__file__).with_name("stale_trial.py"))

Found = Mapping[tuple[str, int], Sequence[Trial]]


def bench(*, quick: bool, say: Say) -> list[Line]:
    if not MODEL.is_dir():
        raise ResourceError(f"{MODEL} does not exist: `make demo` creates it")
    task, seeds = (_QUICK, range(1)) if quick else (Task(), range(2))
    digest = xxhash.xxh3_64(b"".join(path.read_bytes() for path in _OF)).hexdigest()
    results_file = Path("runs/bench") / f"stale-llm{'-quick' if quick else ''}.jsonl"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    done = Done(results_file, of=f"{digest} {task} on {device}", fresh=quick)
    _fill(done, task, seeds, say)
    done.complete()
    return list(lines({cell: [Trial(**done[_name(seed, *cell)]) for seed in seeds] for cell in _CELLS}, task))


def _fill(done: Done, task: Task, seeds: range, say: Say) -> None:
    missing = [(seed, *cell) for seed, cell in product(seeds, _CELLS) if _name(seed, *cell) not in done]
    if not missing:
        return
    at_once = max(1, len(os.sched_getaffinity(0)) // CORES) if torch.cuda.is_available() else 1
    say(f"{len(missing)} cells, {min(at_once, len(missing))} at once")
    # One process each: an engine's processes take their settings from the environment.
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        cells = {pool.submit(_trial, task, *cell): _name(*cell) for cell in missing}
        try:
            for cell in as_completed(cells):
                done.add(cells[cell], asdict(cell.result()))
                say(f"{cells[cell]}: {np.mean(cell.result().right):.1%} right")
        except BaseException:
            for cell in cells:
                cell.cancel()
            raise


def _trial(task: Task, seed: int, loss: str, lag: int) -> Trial:
    torch.set_num_threads(CORES)
    return asyncio.run(_run(config_of(MODEL, loss, task), task, lag=lag, seed=seed, say=Say(_name(seed, loss, lag))))


async def _run(config: schema.Config, task: Task, *, lag: int, seed: int, say: Say) -> Trial:
    engine = VllmEngine(EngineSettings(model=read_model(str(MODEL), trust_remote_code=False), config=config, seed=1))
    say("starting vLLM")
    await engine.start()
    try:
        with scratch_folder(in_memory=True) as folder:  # as a worker's mirror, so that GPUs can pin it
            return await Trainer(config, task, lag=lag, seed=seed, engine=engine).run(folder, say=say)
    finally:
        await engine.stop()


def _name(seed: int, loss: str, lag: int) -> str:
    return f"seed {seed}, {loss}, lag {lag}"


def lines(found: Found, task: Task) -> Iterator[Line]:
    fresh = found[_DEFAULT, 0]
    for lag, tolerated in _TOLERATED.items():
        short = shortfall(fresh, found[_DEFAULT, lag])
        name, goal = f"{_DEFAULT}, lag {lag}: short of on-policy", 100 * max(tolerated, 2 * short.error)
        yield Bar(name=name, value=100 * short.mean, unit="%", goal=goal, better="lower")
    short = shortfall(fresh, found[UNCORRECTED, 32])
    name = f"{UNCORRECTED}, lag 32: short of on-policy, in standard errors (below, this decides nothing)"
    yield Bar(name=name, value=short.mean / max(short.error, 1e-9), unit="", goal=2, better="higher")
    yield Fact(name="held-out answers of a cell", value=task.num_held_out * len(fresh), unit="")
    for (loss, lag), trials in found.items():
        name = f"{loss}, lag {lag}"
        right = Estimate.of(np.array([answer for trial in trials for answer in trial.right], dtype=np.float64))
        yield Fact(name=f"{name}: right", value=right.mean, unit="")
        yield Fact(name=f"{name}: standard error of it", value=right.error, unit="")
        yield Fact(name=f"{name}: clipped tokens", value=float(np.mean([t.clipped for t in trials])), unit="")
        yield Fact(name=f"{name}: effective samples", value=float(np.mean([t.effective for t in trials])), unit="")
        yield Fact(name=f"{name}: tokens of an answer", value=float(np.mean([t.length for t in trials])), unit="")


def shortfall(fresh: Sequence[Trial], stale: Sequence[Trial]) -> Estimate:
    """Return the loss of accuracy relative to on-policy; its error is that of the differences per sum."""
    ours, theirs = (np.array([trial.right for trial in trials], dtype=np.float64).ravel() for trials in (fresh, stale))
    return Estimate.of((ours - theirs) / max(ours.mean(), 1e-9))
