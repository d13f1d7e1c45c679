"""What a run's processes have used, and what a bench of the whole run makes of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench import whole
from bench.descendants import Spent, descendants
from bench.report import Bar
from bench.whole_bare import Bare, Cost, steady
from bench.whole_trl import TrlRan
from tests.helpers import wait_until

CASE = whole.Case(name="tiny", steps=1, groups_per_step=1, longest=1, trl_steps=1, dtype="float32", goal=0.5)
LEAST = Bare(made=Cost(cpu_s=0.01, wall_s=0.008), trained=Cost(cpu_s=0.001, wall_s=0.001))
BURN = """
import sys, time
while time.process_time() < 0.4: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_core_seconds_of_a_process_count_on_when_it_has_ended() -> None:
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {BURN!r}]))"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        spent = Spent(process.pid)
        before = sum(spent.look().values())
        process.stdin.close()
        wait_until(lambda: not list(descendants(process.pid)), description="the child has ended")
        assert sum(spent.look().values()) == before > 0.3  # hundredths are counted, each process in full ones


def test_a_process_that_has_ended_keeps_its_part_until_somebody_has_waited_for_it() -> None:
    words = [sys.executable, "-c", BURN, "cli.main sft"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        spent = Spent(os.getpid())
        assert spent.look()["warm-up"] > 0.3
        process.stdin.close()
        wait_until(lambda: not Path(f"/proc/{process.pid}/cmdline").read_bytes(), description="it has ended")
        assert spent.look()["warm-up"] > 0.3


RAN = whole.Ran(
    start_s=5.0,
    seconds=10.0,
    spent=Counter({"learner": 8.0, "engine": 12.0}),
    made=1000,
    used=750.0,
    trained=2000.0,
    answer=9.0,
)


def test_the_bar_is_what_bare_parts_need_over_what_the_runs_took() -> None:
    slower = replace(RAN, seconds=20.0, spent=Counter({"learner": 16.0, "engine": 24.0, "Redis": 1.0}), made=3000)
    bar, *facts = whole.lines_of(CASE, RAN, slower, LEAST)
    assert isinstance(bar, Bar)
    assert bar.value == pytest.approx((4000 * 0.01 + 4000 * 0.001) / 61)
    told = {fact.name.removeprefix("tiny: "): fact.value for fact in facts}
    assert told["wall time, bare and perfectly overlapped / run"] == pytest.approx(4000 * 0.008 / 30)
    assert told["tokens made that were not trained"] == 1 - 1500 / 4000
    assert told["core-seconds of a token, second run / first"] == pytest.approx((41 / 5000) / (20 / 3000))
    assert (told["learner"], told["engine"], told["Redis"]) == (24.0, 36.0, 1.0)


def test_two_runs_whose_cores_slow_down_give_what_the_minimum_between_them_says() -> None:
    def at(slowness: float) -> whole.Ran:
        return replace(RAN, spent=Counter({part: seconds * slowness for part, seconds in RAN.spent.items()}))

    def bar(slowness: float) -> float:
        least = Bare(made=Cost(0.01 * slowness, 0.008), trained=Cost(0.001 * slowness, 0.001))
        return next(whole.lines_of(CASE, at(slowness - 0.3), at(slowness + 0.3), least)).value

    assert bar(1.5) == pytest.approx(bar(1.0))


def test_trl_is_measured_by_the_same_bare_parts() -> None:
    trl = TrlRan(seconds=40.0, core_s=80.0, made=1000, trained=2000)
    core, wall = whole.trl_lines(CASE, trl, LEAST)
    assert core.value == pytest.approx((1000 * 0.01 + 2000 * 0.001) / 80)
    assert wall.value == pytest.approx(1000 * 0.008 / 40)


async def test_bare_vllm_has_as_many_samples_under_way_at_any_time() -> None:
    under_way: list[int] = []
    live = 0

    async def one(number: int) -> int:
        nonlocal live
        live += 1
        try:
            for _ in range(1 + number % 7):
                under_way.append(live)
                await asyncio.sleep(0)
        finally:
            live -= 1
        return 1 + number % 5

    cost = await steady(one, 8, Spent(os.getpid()))
    assert cost.wall_s > 0
    assert set(under_way[8:]) == {8}
    assert live == 0
