"""Sandboxes next to other work: tests per second, and the CPU share that full-load work keeps while programs loop.

    one process per core, hashing endlessly ──┐
    twice as many endless programs ───────────┴─► who gets the CPU time of a window? median of several windows

The work stands for an engine: it is purely CPU-bound and has no pauses in which programs could run for free. Its share
is relative to the CPU time of both, so that other load on the machine does not matter; its speed with and without the
programs, measured in turns, is reported too.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.code import CodeReward

_BLOCK = bytes(1 << 16)
_GOAL = 0.95


def bench(*, quick: bool, say: Say) -> list[Line]:
    return asyncio.run(_bench(num_pairs=3 if quick else 9, turn_s=1.0 if quick else 3.0, say=say))


async def _bench(*, num_pairs: int, turn_s: float, say: Say) -> list[Line]:
    cores = len(os.sched_getaffinity(0))
    shares, ratios = [], []
    async with _sandbox(cores, time_s=3600.0) as reward:
        tests_per_s = await _speed(reward)
        say(f"{tests_per_s:.4g} tests/s")
        with _work(cores) as work:
            for _ in range(num_pairs):
                alone = await _rate(work, turn_s)
                share, beside = await _beside(reward, work, cores, turn_s)
                shares.append(share)
                ratios.append(beside / alone)
                say(f"beside endless programs {share:.4f} of the processors, {ratios[-1]:.4f} of alone")
    return [
        Bar(name="work's share beside endless programs", value=median(shares), unit="x", goal=_GOAL, better="higher"),
        Fact(name="its speed / alone", value=median(ratios), unit="x"),
        Fact(name="endless programs", value=2 * cores, unit=""),
        Fact(name="tests, one after another", value=tests_per_s, unit="tests/s"),
    ]


async def _speed(reward: CodeReward, num_tests: int = 100) -> float:
    item = _item("def add(a, b):\n    return a + b", ["assert add(1, 2) == 3"] * num_tests)
    await reward.start()
    began = time.monotonic()
    assert await reward.score(item) == 1.0, "all pass"
    return num_tests / (time.monotonic() - began)


async def _beside(reward: CodeReward, work: _Work, cores: int, turn_s: float) -> tuple[float, float]:
    """Return the work's share of the CPU time of both, and its speed."""
    running = [asyncio.create_task(reward.score(_item("while True: pass", ["pass"]))) for _ in range(2 * cores)]
    try:
        while len(programs := _programs(os.getpid(), but=work.pids)) < 2 * cores:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # the kernel sends no notification
        before = _processor_s(work.pids), _processor_s(programs)
        speed = await _rate(work, turn_s)
        mine, theirs = (_processor_s(pids) - then for pids, then in zip((work.pids, programs), before, strict=True))
        return mine / (mine + theirs), speed
    finally:
        await reward.close()  # ends them; the next reward starts its own keeper
        await asyncio.gather(*running, return_exceptions=True)


async def _rate(work: _Work, turn_s: float) -> float:
    """Return blocks per second over all processes."""
    before, began = sum(work.done), time.monotonic()
    await asyncio.sleep(turn_s)
    return float((sum(work.done) - before) / (time.monotonic() - began))


def _processor_s(pids: Sequence[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) * 1e-9


def _programs(of: int, *, but: Sequence[int] = ()) -> list[int]:
    """Return the pids of the sandboxed programs. A keeper has started them, and its reaper (`streamrl.reaper`) it; the
    rest is the work's."""
    reapers = [child for child in _children(of) if child not in but]
    keepers = [keeper for reaper in reapers for keeper in _children(reaper)]
    return [program for keeper in keepers for program in _children(keeper)]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    done: Any  # blocks of each process
    pids: tuple[int, ...]


@asynccontextmanager
async def _sandbox(cores: int, *, time_s: float) -> AsyncIterator[CodeReward]:
    source = schema.CodeReward(type="code", processes=2 * cores, tests=schema.Tests(time_s=time_s))
    reward = CodeReward(source, key="rewards.bench")
    try:
        yield reward
    finally:
        await reward.close()


@contextmanager
def _work(cores: int) -> Iterator[_Work]:
    context = multiprocessing.get_context("spawn")
    done = context.Array("Q", cores, lock=False)
    processes = [context.Process(target=_hash, args=(done, i), daemon=True) for i in range(cores)]
    for process in processes:
        process.start()
    try:
        while not all(done):
            time.sleep(0.01)
        yield _Work(done=done, pids=tuple(process.pid or 0 for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _hash(done: Any, place: int) -> None:
    while True:
        hashlib.sha256(_BLOCK)
        done[place] += 1


def _item(program: str, tests: list[str]) -> ScoreItem:
    return ScoreItem(prompt="", completion=program, token_ids=np.zeros(1, dtype=np.int32), fields={"tests": tests})
