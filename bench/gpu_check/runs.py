"""Runs of `streamrl up` that a part starts, and their processes: none outlives its part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(config: Path, settings: Mapping[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run whose `settings` override those of `config`; end it with the block."""
    overrides = [f"{name}={value}" for name, value in settings.items()]
    run = subprocess.Popen(
        [sys.executable, "-m", "streamrl.ops.cli.main", "up", str(config), *overrides],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    try:
        yield run
    finally:
        _end(run)


def _end(run: subprocess.Popen[bytes]) -> None:
    """Stop the run as an operator would; kill what does not stop."""
    if run.poll() is None:
        everything = {**below(run.pid), run.pid: _began(run.pid)}
        run.send_signal(signal.SIGTERM)
        try:
            run.wait(timeout=60)
        except subprocess.TimeoutExpired:
            for pid, at in everything.items():
                if alive(pid, at):
                    os.kill(pid, signal.SIGKILL)


def below(pid: int) -> Mapping[int, str]:
    """Return all descendants, with the start time of each."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, more = {pid}, True
    while more:
        more = {one for one, stat in parents.items() if stat and int(stat[1]) in found} - found
        found |= more
    return {one: _began(one) for one in found - {pid}}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _began(pid: int) -> str:
    stat = _stat(pid)
    return stat[19] if stat else ""


def alive(pid: int, at: str) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] != "Z" and stat[19] == at
