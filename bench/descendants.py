"""CPU time used by the processes of a command, by role."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_OTHERS = "others"
_TICKS = os.sysconf("SC_CLK_TCK")
# By a word of the command line; the first match wins.
_PARTS = {
    "imports for workers": "vllm.preload_worker",
    "models and imports": "launch.fork_server",
    "warm-up": "cli.main sft",
    "reward model": "reward train",
    "checks": "preflight",
    "reward server": "reward serve",
    "torchrun": "process.agent",
    "learner": "learner.process.fork_server",
    "engine": "vllm.preload_engine",
    "worker": "cli.main worker",
    "engine, spawned": "spawn_main",
    "launcher": "cli.main quickstart",
    "Redis": "-server unix",  # or Valkey
}
# Ranks are forked from torchrun's process and share its command line, so processes are first identified by their name.
_FORKED = {"warm-up": "warm-up", "reward model": "reward model", "reward/0": "reward server", "learner": "learner"}
_FORKED |= {"rank-0": "learner", "worker/0": "worker"}


class Spent:
    """Core-seconds of a process's descendants, as last seen; those that have ended still count."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, tuple[str, float]] = {}

    def look(self) -> Counter[str]:
        """Return core-seconds by role since each process started."""
        for pid in descendants(self._pid):
            before, _ = self._seen.get(pid, (_OTHERS, 0.0))
            try:
                self._seen[pid] = part_of(pid, before=before), cpu_s(pid)
            except OSError:  # the process has ended
                continue
        found: Counter[str] = Counter()
        for part, seconds in self._seen.values():
            found[part] += seconds
        return found


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from descendants(child)


def part_of(pid: int, *, before: str) -> str:
    """Return the role of a process. `before`: its role when last seen, since a zombie has no command line."""
    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    if not words:
        return before
    if "VLLM::" in words:
        return "engine"
    if (name := Path(f"/proc/{pid}/comm").read_text().strip()) in _FORKED:
        return _FORKED[name]
    return next((part for part, word in _PARTS.items() if word in words), _OTHERS)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
