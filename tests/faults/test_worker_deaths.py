"""T8: workers are killed, or stopped and woken too late, in the midst of their groups."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace

import pytest
import redis

from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FaultWorld, Part
from tests.faults.place import Place
from tests.faults.report import report
from tests.helpers import wait_until

LEASE_S = 0.5
_NUM_WORKERS = 3


@pytest.fixture
def place(place: Place) -> Place:
    return replace(place, num_prompts=5000, pace_s=0.1, worker_lease_s=LEASE_S)


def reclaimed_after_s(client: redis.Redis, world: FaultWorld, worker: str) -> float:
    """How long its tickets stayed with a worker that shows no life any more. What a row says of that is bounded by the
    lease and 5 s where nothing else keeps the machine busy."""
    began, tickets = time.monotonic(), world.held_by(client, worker)
    wait_until(
        lambda: not tickets & world.held_by(client, worker),
        description=f"the tickets of {worker} are with others",
    )
    return time.monotonic() - began


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
def test_tickets_of_workers_that_die_or_sleep_in_mid_group_go_to_others(
    world: FaultWorld, client: redis.Redis, count: int
) -> None:
    learner = world.start_learner()
    workers: dict[str, Part] = {f"w{n}": world.start_worker(name=f"w{n}") for n in range(_NUM_WORKERS)}
    asleep: dict[str, Part] = {}
    longest_s = 0.0
    choose = random.Random(1)
    for n in range(count):
        name = choose.choice(sorted(workers))
        wait_until(lambda name=name: world.held_by(client, name), description=f"{name} is at work")
        victim = workers.pop(name)
        number = signal.SIGKILL if n % 2 else signal.SIGSTOP
        victim.send(number)
        if number is signal.SIGSTOP:
            asleep[name] = victim
        longest_s = max(longest_s, reclaimed_after_s(client, world, name))
        replacement = f"w{_NUM_WORKERS + n}"
        workers[replacement] = world.start_worker(name=replacement)
    for sleeper in asleep.values():
        sleeper.send(signal.SIGCONT)

    def goes_on(name: str) -> bool:
        """It finds that its tickets are others': by the refusal of a group that comes too late, or before that by the
        next renewal. Or it has slept through the very answer that gave it the tickets, and takes others."""
        said = asleep[name].output
        return "group_came_late" in said or "lease_lost" in said or bool(world.held_by(client, name))

    wait_until(lambda: all(map(goes_on, asleep)), description="who slept goes on, and without the tickets that it had")

    set_control(client, world.keys, "drain", by="the test")
    learner.ends_with(0)
    audit = world.audit()
    assert audit.outstanding == 0
    report("T8", audit, injections=count, recovery_s=longest_s, lease_s=LEASE_S)
