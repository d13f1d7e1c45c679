"""T5: machines join and leave while groups come in: one rank, then three, then two; the run learns what one rank alone
learns from the same groups.

    machine 0   ├─ 1 rank ─┼─── 3 ranks ───┼── 2 ranks ──┤
    machine 1              ├───────────────┼─────────────┤
    machine 2              ├── kill -9 or SIGTERM
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.ops.audit import audit_folder
from streamrl.ops.launch.parts import Cluster, RunFolder, cluster_holder, learner_command
from streamrl.process import free_port
from streamrl.protocol.transport.keys import Keys
from tests.faults.agents import PATIENCE_S, last_step, named_ranks, wasted_steps
from tests.faults.report import report
from tests.helpers import wait_until
from tests.integration.learner_world import ROOT, lines, made_up_worker, make_run, output, running_learner

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

_GROUPS_PER_STEP = 4
_STEPS_ALONE, _STEPS_OF_THREE, _STEPS = 6, 18, 24  # that there are groups for, at first, then, in all
_TOLERANCE = 1e-5


def make_steps(folder: Path, name: str) -> schema.Config:
    config = make_run(
        folder,
        name=name,
        training=schema.Training(groups_per_step=_GROUPS_PER_STEP, max_steps=_STEPS),
        checkpoint=schema.Checkpoint(every_steps=4),
        optimizer=schema.Optimizer(lr=1e-4, schedule="constant", warmup_steps=0),
        algorithm=schema.Algorithm(drop_zero_variance=False),  # every group is in a step, whichever that is
        lag=schema.Lag(max_steps=2),
    )
    RunFolder(config.folder).logs.mkdir(exist_ok=True)
    return config


@contextmanager
def machine(config: schema.Config, url: str, *, port: int) -> Iterator[subprocess.Popen[str]]:
    """What `streamrl learn --nodes 1:3` runs on each."""
    cluster = Cluster(nodes="1:3", endpoint=f"127.0.0.1:{port}")
    folder = RunFolder(config.folder)
    folder.write_request(config, cluster_holder(config, cluster))
    command = learner_command(config, folder, redis_url=url, cluster=cluster)
    environment = {**os.environ, **command.environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (config.folder / "learner.out").open("a") as out:
        agent = subprocess.Popen(command.arguments, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True)
        try:
            yield agent
        finally:
            agent.kill()
            agent.wait()


def await_ranks(config: schema.Config, agents: list[subprocess.Popen[str]]) -> None:
    """Until each of these machines has a rank of a world of just so many."""

    def all_there() -> bool:
        assert all(agent.poll() is None for agent in agents), f"a machine has left\n{output(config)[-3000:]}"
        return sorted(rank for agent in agents for rank in named_ranks(agent.pid)) == list(range(len(agents)))

    wait_until(all_there, description=f"a world of {len(agents)}", timeout_s=PATIENCE_S)


def await_step(config: schema.Config, step: int) -> None:
    wait_until(
        lambda: last_step(config) >= step,
        description=f"step {step}\n{output(config)[-3000:]}",
        timeout_s=PATIENCE_S,
    )


@pytest.mark.parametrize("leaving", [signal.SIGKILL, signal.SIGTERM])
def test_machines_that_join_and_leave_change_nothing_of_what_is_learnt(
    tmp_path: Path, redis_url: str, run_name: str, client: redis.Redis, leaving: signal.Signals
) -> None:
    config, port = make_steps(tmp_path, run_name), free_port("127.0.0.1")
    groups = _STEPS_ALONE * _GROUPS_PER_STEP  # that may be answered by now
    longest_s = 0.0
    with made_up_worker(config, redis_url, may_answer=lambda: groups), ExitStack() as stack:
        agents = [stack.enter_context(machine(config, redis_url, port=port))]
        await_step(config, _STEPS_ALONE)
        agents += [stack.enter_context(machine(config, redis_url, port=port)) for _ in range(2)]
        await_ranks(config, agents)
        assert client.hget(Keys(config.name).meta, "state") == b"running", "workers took it for the end"
        groups, began = _STEPS_OF_THREE * _GROUPS_PER_STEP, time.monotonic()
        await_step(config, _STEPS_ALONE + 1)
        longest_s = time.monotonic() - began
        agents.pop().send_signal(leaving)
        began = time.monotonic()
        await_ranks(config, agents)
        assert client.hget(Keys(config.name).meta, "state") == b"running", "workers took it for the end"
        groups = _STEPS * _GROUPS_PER_STEP
        await_step(config, _STEPS_OF_THREE + 1)
        longest_s = max(longest_s, time.monotonic() - began)
        for agent in agents:
            assert agent.wait(PATIENCE_S) == 0, output(config)[-3000:]
    audit = audit_folder(config.folder, redis_url=redis_url)
    assert audit.trained == _STEPS * _GROUPS_PER_STEP
    worst = compare(config, learn_alone(tmp_path, f"{run_name}-alone", redis_url))
    name = f"T5 {leaving.name}"
    report(name, audit, injections=2, recovery_s=longest_s, wasted_steps=wasted_steps(config), **worst)
    assert max(worst.values()) <= _TOLERANCE, worst


def learn_alone(folder: Path, name: str, url: str) -> schema.Config:
    config = make_steps(folder, name)
    with made_up_worker(config, url), running_learner(config, url) as learner:
        assert learner.wait(PATIENCE_S) == 0, output(config)
    return config


def compare(one: schema.Config, other: schema.Config) -> dict[str, float]:
    """The largest differences, of losses by step and of weights at the end."""
    losses = [losses_of(config) for config in (one, other)]
    assert losses[0].keys() == losses[1].keys() == set(range(1, _STEPS + 1))
    weights = [safetensors.torch.load_file(config.folder / "export" / "model.safetensors") for config in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    return {
        "loss_differs": max(abs(losses[0][step] - losses[1][step]) for step in losses[0]),
        "weights_differ": max(float(torch.max(torch.abs(w - weights[1][n]))) for n, w in weights[0].items()),
    }


def losses_of(config: schema.Config) -> dict[Any, float]:
    """The last time that each step was made."""
    made = lines(config.folder / "metrics.jsonl")
    return {line["step"]: line["train_optim/loss"] for line in made if "train_optim/loss" in line}
