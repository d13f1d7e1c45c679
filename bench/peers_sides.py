"""The two peers as processes: their inputs, and one monitored run of either.

    inputs: model, prompts, reward, samples per step, learning rate, 2 cores ──► process ──► its steps, its memory

Blocks until the run has reached the target or a limit on steps or time; then the process is ended. Its output stays in
the run's folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.measure import Say
from bench.peer_trl import environment
from bench.peers_curve import Curve, Target, read_streamrl, read_trl
from bench.peers_grades import Snapshot, streamrl_snapshots, trl_snapshots
from bench.peers_terms import NUM_CORES, Terms
from bench.peers_trl_side import BEST, Settings, trl_command
from streamrl.errors import ResourceError
from streamrl.ops.launch.processes import Command, Process, describe_exit, end_all

_LOOK_EVERY_S = 1.0
_FEWEST = 3  # steps needed to compute a rate
_LEAVE_S = 60.0  # for a checkpoint and the workers' last groups
_KV_CACHE_BYTES = 256 << 20  # room for all samples in flight at maximum length
_RUN = "run"  # streamrl's run name, and its folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    prepare: Callable[[Terms, Path, Path, int], Command]  # (terms, prompts, folder of the run, seed)
    read: Callable[[Path], Curve]  # of the run's folder
    snapshots: Callable[[Path], Iterator[Snapshot]]  # of the run's folder, in the order of their steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    target: Target | None
    num_steps: int
    seconds: float  # since the process started


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    curve: Curve
    ready_s: float  # from process start to the first sample
    peak_bytes: int  # of all its processes together


def sides(say: Say) -> tuple[Side, Side]:
    """Return (TRL, streamrl), creating TRL's environment if needed."""
    return (
        trl_side(environment(say), BEST),
        Side(
            name="streamrl",
            prepare=streamrl_command,
            read=lambda folder: read_streamrl(folder / _RUN),
            snapshots=lambda folder: streamrl_snapshots(folder / _RUN),
        ),
    )


def trl_side(python: Path, settings: Settings) -> Side:
    def prepare(terms: Terms, prompts: Path, folder: Path, seed: int) -> Command:
        return trl_command(python, settings, terms, prompts, folder, seed)

    return Side(name="TRL", prepare=prepare, read=read_trl, snapshots=trl_snapshots)


def run(side: Side, terms: Terms, *, prompts: Path, folder: Path, seed: int, limits: Limits, say: Say) -> Watched:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = side.prepare(terms, prompts, folder, seed)
    began = time.time()
    process = Process(command)
    peak_bytes, num_said = 0, 0
    try:
        while True:
            code = process.poll()  # before reading its files, to include what it wrote last
            peak_bytes = max(peak_bytes, memory_of(process.pid))
            curve = side.read(folder)
            num_steps = len(curve.steps)
            if num_steps // 10 > num_said:
                num_said = num_steps // 10
                say(f"{side.name}: step {num_steps}, reward {curve.steps[-1].reward:.3f}")
            if _is_over(curve, limits) or (num_steps >= _FEWEST and time.time() > began + limits.seconds):
                break
            if code is not None or time.time() > began + limits.seconds:
                raise _gone_wrong(side, process, code)
            time.sleep(_LOOK_EVERY_S)
    finally:
        end_all([process], within_s=_LEAVE_S)
    assert curve.began is not None, "there were steps"
    return Watched(curve=curve, ready_s=curve.began - began, peak_bytes=peak_bytes)


@contextmanager
def on_two_cores() -> Iterator[None]:
    """Restrict this process, and all that it starts inside, to two cores."""
    before = os.sched_getaffinity(0)
    if len(before) < NUM_CORES:
        raise ResourceError(f"the peers are compared on {NUM_CORES} cores; this process may use {len(before)}")
    os.sched_setaffinity(0, sorted(before)[:NUM_CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def memory_of(pid: int) -> int:
    """Return the memory of a process tree in bytes; shared pages count once."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has just ended
            continue
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = 0, [pid]
    while todo:
        one = todo.pop()
        todo += parents.get(one, [])
        found += _share(one)
    return found


def _share(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _is_over(curve: Curve, limits: Limits) -> bool:
    if limits.target is not None and curve.until(limits.target) is not None:
        return True
    return len(curve.steps) >= limits.num_steps


def _gone_wrong(side: Side, process: Process, code: int | None) -> ResourceError:
    how = f"made fewer than {_FEWEST} steps in its time" if code is None else describe_exit(code)
    words = "\n".join(f"  {line}" for line in process.last_words())
    return ResourceError(f"{side.name} {how}; {process.command.log} ends with:\n{words}")


def streamrl_command(terms: Terms, prompts: Path, folder: Path, seed: int) -> Command:
    file = folder / "peers.yaml"
    file.write_text(yaml.safe_dump(_config(terms, prompts, folder, seed)))
    return Command(
        name="streamrl",
        arguments=(sys.executable, "-m", "streamrl.ops.cli.main", "up", str(file)),
        log=folder / "streamrl.log",
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def _config(terms: Terms, prompts: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Return the changed settings: TRL's objective and optimizer, and those for a small model on two cores."""
    return {
        "name": _RUN,
        "dir": str(folder),
        "seed": seed,
        "model": {"path": str(terms.model), "dtype": "float32"},
        "data": {"train": str(prompts), "max_prompt_tokens": 16, "shuffle": False},
        "sampling": {"num_samples": terms.num_samples, "max_tokens": terms.longest},
        "rewards": {"right": {"type": "function", "target": f"{terms.reward}:reward"}},
        # TRL sums the logprobs of an answer, and trains on truncated answers and groups of equal rewards.
        "algorithm": {
            "loss_mean": "token",
            "drop_zero_variance": False,
            "mask_unfinished": False,
            "kl": {"placement": "none"},
        },
        "optimizer": {
            "lr": terms.lr,
            "schedule": "constant",
            "warmup_steps": 0,
            "betas": list(terms.betas),
            "weight_decay": 0.0,
            "clip_norm": terms.clip_norm,
        },
        "training": {
            "groups_per_step": terms.groups_per_step,
            "max_steps": terms.max_steps,
            "micro_batch_tokens": 4096,
        },
        "lag": {"max_steps": 2},  # with 1, both wait for the longest answers: three quarters of the samples per second
        "weights": {"dtype": "float32"},
        "checkpoint": {"every_steps": terms.snapshot_every, "keep_last": terms.max_steps},
        "validation": {"every_steps": 0, "at_start": False, "at_end": False},
        "worker": {"threads": 1, "grace_s": 1.0, "engine_args": {"kv_cache_memory_bytes": _KV_CACHE_BYTES}},
        "learner": {"threads": 1},
    }
