"""Medians of interleaved rounds, progress on stderr, and an environment that is left as it was."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median


class Say:
    """Tells whoever waits what is being measured, and since when the bench runs."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{self._bench} {time.monotonic() - self._began:5.1f} s] {text}", file=sys.stderr, flush=True)


class Rounds:
    """Several ways of doing something, measured by turns: what disturbs the machine disturbs all of them."""

    def __init__(self, ways: Mapping[str, Callable[[], float]], *, num_rounds: int, say: Say | None = None) -> None:
        self._rounds: list[dict[str, float]] = []
        for number in range(num_rounds):
            self._rounds.append({name: measure() for name, measure in ways.items()})
            if say is not None:
                figures = ", ".join(f"{name} {value:,.4g}" for name, value in self._rounds[-1].items())
                say(f"round {number + 1} of {num_rounds}: {figures}")

    def median(self, name: str) -> float:
        return median(one[name] for one in self._rounds)

    def ratio(self, name: str, to: str) -> float:
        """The median of the rounds' ratios: each compares what was measured within seconds."""
        return median(one[name] / one[to] for one in self._rounds)


def cpu_s(pid: int) -> float:
    """What a process has used so far, to the nanosecond: /proc/PID/stat counts in hundredths of a second."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def environment_as_it_was() -> Iterator[None]:
    """vLLM is told, and tells its processes, through the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
