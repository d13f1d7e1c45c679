"""Sandboxes beside work: how many tests a second, and what the work on all cores has left while programs loop.

    a process a core, hashing without end ─► bytes/s      alone, and beside `processes` endless programs, in turns

The work stands for an engine's computing: it is bound by the processor alone, and has no pauses in which programs could
run for nothing. Each turn is measured by the work of all its processes; the figure is the median over pairs of turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
    ratios = []
    async with _sandbox(cores, time_s=3600.0) as reward:
        tests_per_s = await _speed(reward)
        say(f"{tests_per_s:.4g} tests/s")
        with _work(cores) as done:
            for _ in range(num_pairs):
                alone = await _rate(done, turn_s)
                beside = await _rate_beside(reward, done, cores, turn_s)
                ratios.append(beside / alone)
                say(f"beside endless programs {ratios[-1]:.4f} of alone")
    return [
        Bar(name="work beside endless programs / alone", value=median(ratios), unit="x", goal=_GOAL, better="higher"),
        Fact(name="endless programs", value=2 * cores, unit=""),
        Fact(name="tests, one after another", value=tests_per_s, unit="tests/s"),
    ]


async def _speed(reward: CodeReward, num_tests: int = 100) -> float:
    item = _item("def add(a, b):\n    return a + b", ["assert add(1, 2) == 3"] * num_tests)
    await reward.start()
    began = time.monotonic()
    assert await reward.score(item) == 1.0, "all pass"
    return num_tests / (time.monotonic() - began)


async def _rate_beside(reward: CodeReward, done: Any, cores: int, turn_s: float) -> float:
    running = [asyncio.create_task(reward.score(_item("while True: pass", ["pass"]))) for _ in range(2 * cores)]
    try:
        await asyncio.sleep(0.2)  # until they run
        return await _rate(done, turn_s)
    finally:
        await reward.close()  # ends them; the next one begins a keeper of its own
        await asyncio.gather(*running, return_exceptions=True)


async def _rate(done: Any, turn_s: float) -> float:
    """Blocks a second of all processes."""
    before, began = sum(done), time.monotonic()
    await asyncio.sleep(turn_s)
    return float((sum(done) - before) / (time.monotonic() - began))


@asynccontextmanager
async def _sandbox(cores: int, *, time_s: float) -> AsyncIterator[CodeReward]:
    source = schema.CodeReward(type="code", processes=2 * cores, tests=schema.Tests(time_s=time_s))
    reward = CodeReward(source, key="rewards.bench")
    try:
        yield reward
    finally:
        await reward.close()


@contextmanager
def _work(cores: int) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    done = context.Array("Q", cores, lock=False)
    processes = [context.Process(target=_hash, args=(done, i), daemon=True) for i in range(cores)]
    for process in processes:
        process.start()
    try:
        while not all(done):
            time.sleep(0.01)
        yield done
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
