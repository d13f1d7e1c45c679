"""From the quickstart's command to its first sample: this checkout against another commit, in turns.

Each round runs the quickstart of both for two steps, and polls its processes ten times per second. A first run of each,
which finds cold file caches and no bytecode, is discarded. Samples can be generated once the worker has loaded the
first weights, according to its log. Other load on the machine is fine for the core-seconds, which count the run's own
processes up to then and show what can be saved. The other commit is `$STREAMRL_START_AGAINST`, by default HEAD~1; it
runs in its own work tree, with this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

from bench.descendants import Spent
from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.errors import ResourceError

HERE = Path(__file__).parents[1]
_GOAL = 0.6  # relative to the other commit
_LIMIT_S = 900.0
_END_S = 60.0  # for an orderly shutdown
_LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class Start:
    first_sample_s: float = 0.0
    prepared_s: float = 0.0  # when Redis started
    cpu_s: Counter[str] = field(default_factory=Counter)  # by role, up to the first sample


def bench(*, quick: bool, say: Say) -> list[Line]:
    against = os.environ.get("STREAMRL_START_AGAINST", "HEAD~1")
    with _checkout(against) as other:
        ways = {"here": HERE, "there": other}
        for way, checkout in ways.items():
            say(f"a first run {way}, discarded")
            start(checkout)
        rounds: list[dict[str, Start]] = []
        for number in range(1 if quick else 3):
            # They take turns being first, since the machine changes meanwhile.
            order = list(ways) if number % 2 else list(reversed(ways))
            rounds.append({way: start(ways[way]) for way in order})
            here, there = (rounds[-1][way].first_sample_s for way in ways)
            say(f"round {number + 1}: first sample after {here:.1f} s here, {there:.1f} s there")
    return list(_lines(rounds))


def _lines(rounds: list[dict[str, Start]]) -> Iterator[Line]:
    ratios = [one["here"].first_sample_s / one["there"].first_sample_s for one in rounds]
    name = "first sample of the quickstart, of the other commit's"
    yield Bar(name=name, value=median(ratios), unit="x", goal=_GOAL, better="lower")
    spent = [sum(one["here"].cpu_s.values()) / sum(one["there"].cpu_s.values()) for one in rounds]
    yield Fact(name="core-seconds up to it, of the other commit's", value=median(spent), unit="x")
    for way in ("here", "there"):
        starts = [one[way] for one in rounds]
        yield Fact(name=f"first sample, {way}", value=median(one.first_sample_s for one in starts), unit="s")
        yield Fact(name=f"models and data made, {way}", value=median(one.prepared_s for one in starts), unit="s")
        parts = {part for one in starts for part in one.cpu_s}
        for part in sorted(parts):
            yield Fact(name=f"{part}, {way}", value=median(one.cpu_s[part] for one in starts), unit="core-s")


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "other"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def start(checkout: Path) -> Start:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        arguments = ["-m", "streamrl.ops.cli.main", "quickstart", f"dir={folder}", "training.max_steps=2"]
        # The installed script would import this checkout.
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        began = time.time()
        with (folder / "out").open("wb") as out:
            run = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            found = _watch(run, folder / "quickstart", began)
            code = run.wait(_LIMIT_S)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(_END_S)
        if code != 0:
            raise RuntimeError(f"the quickstart of {checkout} failed:\n{(folder / 'out').read_text()[-2000:]}")
    if not found.first_sample_s:
        raise ResourceError(f"the quickstart of {checkout} ended, and its worker's log has no version_loaded")
    return found


def _watch(run: subprocess.Popen[bytes], folder: Path, began: float) -> Start:
    """Watch the run until the first sample can be generated."""
    found, spent = Start(), Spent(os.getpid())
    while run.poll() is None:
        by_part = spent.look()
        if not found.prepared_s and (folder / "redis").exists():
            found.prepared_s = time.time() - began
        if (loaded := _first_loaded(folder / "logs" / "worker-0.log")) is not None:
            found.first_sample_s, found.cpu_s = loaded - began, by_part
            return found
        if time.time() - began > _LIMIT_S:
            run.terminate()
        time.sleep(_LOOK_EVERY_S)
    return found


def _first_loaded(log: Path) -> float | None:
    try:
        lines = log.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if '"version_loaded"' in line and line.endswith("}"):
            return datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp()
    return None
