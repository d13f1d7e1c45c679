"""Medians of interleaved rounds, progress on stderr, and restoring the environment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median


class Say:
    """Prints what is being measured, with the time since the bench started."""

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{self._bench} {time.monotonic() - self._began:5.1f} s] {text}", file=sys.stderr, flush=True)


class Rounds:
    """Alternatives measured in turns, so that disturbances of the machine affect all of them."""

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
        """Return the median of the ratios per round, each of values measured within seconds."""
        return median(one[name] / one[to] for one in self._rounds)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process in nanosecond resolution; /proc/PID/stat counts hundredths of a second."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def environment_as_it_was() -> Iterator[None]:
    """Restore environment variables on exit: vLLM is configured through them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
