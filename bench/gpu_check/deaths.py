"""Five steps of a real run in which rank and worker are killed with -9: both must come back, and nothing may be left.

If anything holds a GPU after its process is gone, the next start fails, so a killed worker's engine must end at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from bench.gpu_check.rows import Row, Scale
from bench.gpu_check.runs import alive, below, running
from streamrl.demos.quickstart import write_base_model, write_data
from streamrl.errors import ResourceError
from streamrl.held_folders import scratch_folder

_STEPS = 5
_START_S, _STEP_S, _END_S = 300.0, 180.0, 10.0  # limits; the last: for an orphaned engine to end
_POLL_S = 0.05
_MISMATCH, _APART = "policy/fresh_mismatch", 0.05
# Log events that report a slower path or a retry; the run continues.
_SAID = {
    "changes not written in their place": "loads_all_weights",
    "memory not pinned": "memory not pinned",
    "loads rejected": "load_rejected",
    "engines that failed": "engine_failed",
}
_REASON = re.compile(r'(?:reason|error)"?[=:] ?["\']([^"\']*)')  # in JSON, and as an engine's process prints it
_SETTINGS = {
    "training.max_steps": _STEPS,
    "training.groups_per_step": 4,
    "algorithm.drop_zero_variance": "false",  # an untrained model never answers correctly
    "lag.max_steps": 4,
    "data.validation": "null",
    "validation.every_steps": 0,
    "checkpoint.every_steps": 1,
    "rewards.model": "null",
    "reward_server": "null",
    "worker.count": 1,
}


def check(scale: Scale) -> Iterator[Row]:
    conf = Path(__file__).parents[2] / "conf" / "quickstart.yaml"
    with scratch_folder() as folder, running(conf, _prepared(folder)) as run:
        yield from _watched(run, folder / "run" / "quickstart")


def _watched(run: subprocess.Popen[bytes], folder: Path) -> Iterator[Row]:
    began = time.monotonic()
    _await(lambda: _steps(folder) >= 1, _START_S, "the first step", run)
    yield Row(what="start to first step", value=time.monotonic() - began, unit="s", note="quickstart's model")
    [rank] = [pid for pid in below(run.pid) if _name(pid) == "rank-0"]
    done, killed = _steps(folder), time.monotonic()
    os.kill(rank, signal.SIGKILL)
    _await(lambda: _steps(folder) > done, _STEP_S, "a step after the rank's death", run)
    yield Row(what="kill -9 of the rank: next step after", value=time.monotonic() - killed, unit="s")
    worker = next(pid for pid in below(run.pid) if _is_worker(pid))
    children, killed = below(worker), time.monotonic()
    os.kill(worker, signal.SIGKILL)
    while (left := [pid for pid, at in children.items() if alive(pid, at)]) and time.monotonic() < killed + _END_S:
        time.sleep(_POLL_S)
    note = f"of {len(children)}; the last ended after {time.monotonic() - killed:.2f} s"
    yield Row(what="kill -9 of the worker: orphans", value=len(left), unit="", goal=0, better="lower", note=note)
    everything = below(run.pid)
    code = run.wait(timeout=_START_S)
    yield Row(what="exit code of the run", value=code, unit="", goal=0, better="lower")
    yield Row(what="steps made", value=_steps(folder), unit="", goal=_STEPS)
    still = [pid for pid, at in everything.items() if alive(pid, at)]
    yield Row(what="processes left", value=len(still), unit="", goal=0, better="lower")
    yield from told_by(folder)


def told_by(folder: Path) -> Iterator[Row]:
    """Yield what the run's files report about GPU-only paths."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    off = [row[_MISMATCH] for row in rows if _MISMATCH in row]
    note = f"|log mu - log pi|, mean over fresh tokens; the largest of {len(off)} steps"
    apart = max(off, default=1.0)
    yield Row(what="engine and learner apart", value=apart, unit="nats", goal=_APART, better="lower", note=note)
    for what, words in _SAID.items():
        lines = [line for file in (folder / "logs").iterdir() for line in file.read_text().splitlines()]
        matching = [line for line in lines if words in line]
        why = "; ".join(sorted({found[1] for line in matching if (found := _REASON.search(line))}))
        yield Row(what=what, value=len(matching), unit="lines", goal=0, better="lower", note=why)


def _prepared(folder: Path) -> Mapping[str, object]:
    """Write what the run needs; return its settings."""
    write_base_model(folder / "base", seed=1)
    write_data(folder / "data", seed=1)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"  # flash attention needs bf16
    return {
        **_SETTINGS,
        "dir": folder / "run",
        "model.path": folder / "base",
        "data.train": folder / "data" / "train.jsonl",
        "model.dtype": dtype,
        "weights.dtype": dtype,
    }


def _steps(folder: Path) -> int:
    try:
        rows = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return max((json.loads(row)["step"] for row in rows if row.endswith("}")), default=0)


def _await(holds: Callable[[], bool], limit_s: float, what: str, run: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        if run.poll() is not None:
            raise ResourceError(f"the run ended with code {run.returncode} before {what}")
        if time.monotonic() > until:
            raise ResourceError(f"no sign of {what} within {limit_s:g} s")
        time.sleep(_POLL_S)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _is_worker(pid: int) -> bool:
    try:
        return b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split()
    except OSError:
        return False
