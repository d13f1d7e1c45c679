"""T15: the learner is ten times slower for a while: what waits for it stays within its bound, and nothing is trimmed
that was not trained.

Slower by force: of each half second it runs for a twentieth, and is stopped for the rest.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest
import redis

from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FaultWorld, Part
from tests.faults.place import GROUPS_PER_STEP, Place
from tests.faults.report import report
from tests.faults.stand_in_learner import STEP
from tests.helpers import wait_until

_RUNS_S, _SLEEPS_S = 0.05, 0.45
_NUM_WORKERS = 2
_PATIENCE_S = 240.0


@pytest.fixture
def place(place: Place) -> Place:
    return replace(place, num_prompts=100_000, pace_s=0.005, learner_lease_s=2.0, worker_lease_s=2.0)


@pytest.mark.parametrize("seconds", [3.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_a_learner_that_is_ten_times_slower_holds_its_workers_back(
    world: FaultWorld, client: redis.Redis, seconds: float
) -> None:
    learner = world.start_learner()
    for number in range(_NUM_WORKERS):
        world.start_worker(name=f"w{number}")
    await_steps(learner, 10)
    before, began, peak = num_steps(learner), time.monotonic(), 0
    while time.monotonic() - began < seconds or num_steps(learner) == before:
        assert time.monotonic() - began < _PATIENCE_S, "no step while it is slow"
        slow_down(learner)
        peak = max(peak, client.xlen(world.keys.groups("train")))
    steps_while_slow = num_steps(learner) - before
    began = time.monotonic()
    await_steps(learner, num_steps(learner) + 10)
    recovery_s = time.monotonic() - began
    set_control(client, world.keys, "drain", by="the test")
    learner.ends_with(0)

    audit = world.audit()
    assert audit.outstanding == 0
    bound = most_groups(world.place)
    found = {"peak_groups": peak, "bound": bound, "steps_while_slow": steps_while_slow}
    report("T15", audit, injections=1, recovery_s=recovery_s, **found)
    assert peak <= bound


def most_groups(place: Place) -> int:
    """On their way or in hand, and those that ended since what the checkpoint holds, some of which are dropped without
    a step. A checkpoint is written beside the steps up to the next one, which waits for it."""
    on_the_way = (place.config().lag.max_steps + 1) * GROUPS_PER_STEP
    uncommitted = 2 * place.commit_every * GROUPS_PER_STEP
    return on_the_way + 2 * uncommitted


def num_steps(learner: Part) -> int:
    return learner.output.count(STEP)


def await_steps(learner: Part, count: int) -> None:
    wait_until(
        lambda: num_steps(learner) >= count,
        description=f"{count} steps\n{learner.output[-2000:]}",
        timeout_s=_PATIENCE_S,
    )


def slow_down(learner: Part) -> None:
    """For one period."""
    learner.send(signal.SIGSTOP)
    learner.wait_until_stopped()
    never = threading.Event()
    never.wait(_SLEEPS_S)
    learner.send(signal.SIGCONT)
    never.wait(_RUNS_S)
