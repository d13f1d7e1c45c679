"""T1, T3, T4, T9: ranks of the real learner under torchrun are killed or stopped, and so is torchrun itself."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from streamrl.audit import audit_folder
from streamrl.config import schema
from tests.faults.report import report
from tests.helpers import wait_until
from tests.integration.learner_world import lines, made_up_worker, make_run, output, running_learner

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

_RANKS = 2
_PATIENCE_S = 90.0
_STOPPED_LIMIT_S = 10.0  # as learner/__main__.py has it
_RESTART_S = 50.0  # torchrun, imports, model and first step, on two busy cores


def make_long_run(folder: Path, name: str) -> schema.Config:
    return make_run(
        folder,
        name=name,
        num_prompts=100_000,
        training=schema.Training(groups_per_step=4, max_steps=100_000),
        checkpoint=schema.Checkpoint(every_steps=5),
    )


def ranks(agent: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun's agent has started, in the order of ranks, once all of them are there."""

    def all_there() -> list[int]:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        found = {rank: int(pid) for pid in children if (rank := _variable(int(pid), "RANK")) is not None}
        return [found[rank] for rank in sorted(found)] if len(found) == _RANKS else []

    return wait_until(all_there, description="all ranks", timeout_s=_PATIENCE_S)


def _variable(pid: int, name: str) -> str | None:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((word.decode().partition("=")[2] for word in words if word.startswith(f"{name}=".encode())), None)


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in descendants(int(child)))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def epoch_at_work(config: schema.Config) -> int:
    """Of the last step that was recorded; 0 before the first."""
    made = lines(config.folder / "metrics.jsonl")
    return int(made[-1]["epoch"]) if made else 0


def await_steps(config: schema.Config, *, beyond_epoch: int = 0, description: str) -> None:
    wait_until(lambda: epoch_at_work(config) > beyond_epoch, description=f"{description}", timeout_s=_PATIENCE_S)


def end(config: schema.Config, agent: subprocess.Popen[str]) -> None:
    """In good order, so that everything is committed."""
    agent.send_signal(signal.SIGTERM)
    agent.wait(_PATIENCE_S)


def wasted_steps(config: schema.Config) -> int:
    made = [record["step"] for record in lines(config.folder / "metrics.jsonl")]
    return len(made) - len(set(made))


@pytest.mark.parametrize("count", [8, 50])
def test_ranks_that_are_killed_at_random_cost_the_steps_since_the_checkpoint(
    tmp_path: Path, redis_url: str, run_name: str, count: int
) -> None:
    config = make_long_run(tmp_path, run_name)
    choose = random.Random(count)
    recoveries: list[float] = []
    with (
        made_up_worker(config, redis_url),
        running_learner(config, redis_url, processes=_RANKS, max_restarts=count + 5) as agent,
    ):
        await_steps(config, description="the first step")
        for _ in range(count):
            before = epoch_at_work(config)
            os.kill(choose.choice(ranks(agent)), signal.SIGKILL)
            began = time.monotonic()
            await_steps(config, beyond_epoch=before, description=f"a step after a death\n{output(config)[-2000:]}")
            recoveries.append(time.monotonic() - began)
        end(config, agent)
    p95 = sorted(recoveries)[math.ceil(0.95 * len(recoveries)) - 1]
    audit = audit_folder(config.folder, redis_url=redis_url)
    report("T1", audit, injections=count, recovery_s=max(recoveries), wasted_steps=wasted_steps(config), p95_s=p95)


def test_ranks_die_with_their_agent_and_another_agent_goes_on(tmp_path: Path, redis_url: str, run_name: str) -> None:
    config = make_long_run(tmp_path, run_name)
    with made_up_worker(config, redis_url):
        with running_learner(config, redis_url, processes=_RANKS) as agent:
            await_steps(config, description="the first step")
            orphans = ranks(agent)
            agent.kill()
            began, before = time.monotonic(), epoch_at_work(config)
            wait_until(lambda: not any(map(is_alive, orphans)), description="no orphans", timeout_s=2.0)
        with running_learner(config, redis_url, processes=_RANKS) as agent:
            await_steps(config, beyond_epoch=before, description=f"a step of the next agent\n{output(config)[-2000:]}")
            recovery_s = time.monotonic() - began
            end(config, agent)
    audit = audit_folder(config.folder, redis_url=redis_url)
    report("T3", audit, injections=1, recovery_s=recovery_s, wasted_steps=wasted_steps(config), orphans=0)


def test_a_whole_tree_that_slept_past_its_lease_is_replaced_and_does_no_harm_when_it_wakes(
    tmp_path: Path, redis_url: str, run_name: str
) -> None:
    config = make_long_run(tmp_path, run_name)
    with made_up_worker(config, redis_url), running_learner(config, redis_url, processes=_RANKS) as first:
        await_steps(config, description="the first step")
        tree = descendants(first.pid)
        for pid in tree:
            os.kill(pid, signal.SIGSTOP)
        began, before = time.monotonic(), epoch_at_work(config)
        with running_learner(config, redis_url, processes=_RANKS) as second:
            await_steps(config, beyond_epoch=before, description=f"a step of the second\n{output(config)[-2000:]}")
            recovery_s = time.monotonic() - began
            at_work = epoch_at_work(config)
            for pid in tree:
                os.kill(pid, signal.SIGCONT)
            zombies = set(tree) - {first.pid}
            wait_until(lambda: not any(map(is_alive, zombies)), description="the zombies end", timeout_s=_PATIENCE_S)
            assert epoch_at_work(config) == at_work, "the second was disturbed"
            end(config, second)
        first.kill()
    audit = audit_folder(config.folder, redis_url=redis_url)
    report("T4 tree", audit, injections=1, recovery_s=recovery_s, wasted_steps=wasted_steps(config))


@pytest.mark.parametrize("rank", range(_RANKS))
def test_a_rank_that_is_stopped_is_replaced_without_a_person(
    tmp_path: Path, redis_url: str, run_name: str, rank: int
) -> None:
    config = make_long_run(tmp_path, run_name)
    with made_up_worker(config, redis_url), running_learner(config, redis_url, processes=_RANKS) as agent:
        await_steps(config, description="the first step")
        before = epoch_at_work(config)
        os.kill(ranks(agent)[rank], signal.SIGSTOP)
        began = time.monotonic()
        await_steps(config, beyond_epoch=before, description=f"a step after the stop\n{output(config)[-2000:]}")
        recovery_s = time.monotonic() - began
        end(config, agent)
    assert recovery_s <= _STOPPED_LIMIT_S + _RESTART_S
    audit = audit_folder(config.folder, redis_url=redis_url)
    report(f"T9 rank {rank}", audit, injections=1, recovery_s=recovery_s, wasted_steps=wasted_steps(config))
