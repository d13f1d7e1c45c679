"""T1, T3, T4, T9: ranks of the real learner under torchrun are killed or stopped, and so is torchrun itself."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.ops.audit import audit_folder
from tests.faults.agents import (
    PATIENCE_S,
    await_steps,
    descendants,
    end,
    is_alive,
    num_made,
    ranks,
    term_at_work,
    wasted_steps,
)
from tests.faults.report import report
from tests.helpers import wait_until
from tests.integration.learner_world import made_up_worker, make_run, output, running_learner
from tests.tiny_families import make_family

pytestmark = pytest.mark.timeout(1500)

_RANKS = 2
_LONGEST_QUIET_S = 1.0  # between a step after a restart and the next kill
_FEW = 5  # kills, of which no percentile is worth a word
_MOST_RECOVERY_S = 8.0  # p95, from the death to the next completed step; the tiny model's load is in it
_STOPPED_LIMIT_S = 10.0  # as learner/main.py has it
_RESTART_S = 50.0  # torchrun, imports, model and first step, on two busy cores


def make_long_run(folder: Path, name: str, **sections: Any) -> schema.Config:
    return make_run(
        folder,
        name=name,
        **sections,
        num_prompts=100_000,
        training=schema.Training(groups_per_step=4, max_steps=100_000),
        checkpoint=schema.Checkpoint(
            every_steps=5, resume=False
        ),  # not to be started again; restarts are another thing
    )


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.long)])
def test_ranks_that_are_killed_at_random_cost_the_steps_since_the_checkpoint(
    tmp_path: Path,
    redis_url: str,
    run_name: str,
    count: int,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    config = make_long_run(tmp_path, run_name)
    recoveries: list[float] = []
    for rank, recovery_s in killed_at_random(config, redis_url, count=count):
        recoveries.append(recovery_s)
        if count > _FEW:
            with capsys.disabled():
                print(f"\nkill {len(recoveries)} of {count}: rank {rank}, {recovery_s:.1f} s", end="", flush=True)
    p50, p95 = (percentile(recoveries, q) for q in (0.5, 0.95))
    wasted, made = wasted_steps(config), num_made(config)
    figure = f"{count} kills: recovery p50 {p50:.1f} s, p95 {p95:.1f} s; {wasted} of {made} steps wasted"
    record_property("figure", figure)
    audit = audit_folder(config.folder, redis_url=redis_url)
    percentiles = {"p50_s": p50, "p95_s": p95} if count > _FEW else {}
    report("T1", audit, injections=count, recovery_s=max(recoveries), wasted_steps=wasted, **percentiles)
    # A rank that dies while a checkpoint is written goes on from the one before; the next one waits for it.
    assert wasted <= count * 2 * config.checkpoint.every_steps
    assert count <= _FEW or p95 <= _MOST_RECOVERY_S, figure


def killed_at_random(config: schema.Config, url: str, *, count: int) -> Iterator[tuple[int, float]]:
    """(rank, seconds to the next step) of each."""
    choose = random.Random(count)
    with (
        made_up_worker(config, url),
        running_learner(config, url, processes=_RANKS, max_restarts=count + 5) as agent,
    ):
        await_steps(config, description="the first step")
        for _ in range(count):
            threading.Event().wait(choose.uniform(0, _LONGEST_QUIET_S))
            before, rank = term_at_work(config), choose.randrange(_RANKS)
            os.kill(ranks(agent, number=_RANKS)[rank], signal.SIGKILL)
            began = time.monotonic()
            await_steps(config, beyond_term=before, description=f"a step after a death\n{output(config)[-2000:]}")
            yield rank, time.monotonic() - began
        end(agent)


@pytest.mark.long
@pytest.mark.parametrize("shared", ["context", "tensor", "experts"])
def test_a_killed_rank_that_shares_samples_layers_or_experts_costs_what_others_cost(
    tmp_path: Path, redis_url: str, run_name: str, shared: str
) -> None:
    """The other one waits for it in the midst of a layer."""
    make_family(tmp_path / "model", "qwen3_moe", num_key_value_heads=2)
    learner = schema.Learner.model_validate(
        {"threads": 1, "lease_s": 5.0, "idle_timeout_s": 60.0, "layout": {shared: _RANKS}}
    )
    config = make_long_run(tmp_path, run_name, learner=learner)
    recoveries = [recovery_s for _, recovery_s in killed_at_random(config, redis_url, count=2)]
    wasted = wasted_steps(config)
    audit = audit_folder(config.folder, redis_url=redis_url)
    report(f"T1 {shared}", audit, injections=2, recovery_s=max(recoveries), wasted_steps=wasted)
    assert wasted <= 2 * 2 * config.checkpoint.every_steps
    assert max(recoveries) <= _RESTART_S


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    return sorted(values)[math.ceil(q * len(values)) - 1]


@pytest.mark.long
def test_ranks_die_with_their_agent_and_another_agent_goes_on(tmp_path: Path, redis_url: str, run_name: str) -> None:
    config = make_long_run(tmp_path, run_name)
    with made_up_worker(config, redis_url):
        with running_learner(config, redis_url, processes=_RANKS) as agent:
            await_steps(config, description="the first step")
            orphans = ranks(agent, number=_RANKS)
            agent.kill()
            began, before = time.monotonic(), term_at_work(config)
            wait_until(lambda: not any(map(is_alive, orphans)), description="no orphans", timeout_s=2.0)
        with running_learner(config, redis_url, processes=_RANKS) as agent:
            await_steps(config, beyond_term=before, description=f"a step of the next agent\n{output(config)[-2000:]}")
            recovery_s = time.monotonic() - began
            end(agent)
    audit = audit_folder(config.folder, redis_url=redis_url)
    report("T3", audit, injections=1, recovery_s=recovery_s, wasted_steps=wasted_steps(config), orphans=0)


@pytest.mark.long
def test_a_whole_tree_that_slept_past_its_lease_is_replaced_and_does_no_harm_when_it_wakes(
    tmp_path: Path, redis_url: str, run_name: str
) -> None:
    config = make_long_run(tmp_path, run_name)
    with made_up_worker(config, redis_url), running_learner(config, redis_url, processes=_RANKS) as first:
        await_steps(config, description="the first step")
        tree = descendants(first.pid)
        zombies = [pid for rank in ranks(first, number=_RANKS) for pid in descendants(rank)]
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        began, before = time.monotonic(), term_at_work(config)
        with running_learner(config, redis_url, processes=_RANKS) as second:
            await_steps(config, beyond_term=before, description=f"a step of the second\n{output(config)[-2000:]}")
            recovery_s = time.monotonic() - began
            at_work = term_at_work(config)
            for pid in tree:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: not any(map(is_alive, zombies)), description="the zombies end", timeout_s=PATIENCE_S)
            assert term_at_work(config) == at_work, "the second was disturbed"
            end(second)
        first.kill()
    audit = audit_folder(config.folder, redis_url=redis_url)
    report("T4 tree", audit, injections=1, recovery_s=recovery_s, wasted_steps=wasted_steps(config))


@pytest.mark.long
@pytest.mark.parametrize("rank", range(_RANKS))
def test_a_rank_that_is_stopped_is_replaced_without_a_person(
    tmp_path: Path, redis_url: str, run_name: str, rank: int
) -> None:
    config = make_long_run(tmp_path, run_name)
    with made_up_worker(config, redis_url), running_learner(config, redis_url, processes=_RANKS) as agent:
        await_steps(config, description="the first step")
        before = term_at_work(config)
        os.kill(ranks(agent, number=_RANKS)[rank], signal.SIGSTOP)
        began = time.monotonic()
        await_steps(config, beyond_term=before, description=f"a step after the stop\n{output(config)[-2000:]}")
        recovery_s = time.monotonic() - began
        end(agent)
    assert recovery_s <= _STOPPED_LIMIT_S + _RESTART_S
    audit = audit_folder(config.folder, redis_url=redis_url)
    report(f"T9 rank {rank}", audit, injections=1, recovery_s=recovery_s, wasted_steps=wasted_steps(config))
