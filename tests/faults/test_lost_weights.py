"""T10: Redis loses the weights while no worker has them; whoever comes next is served all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from tests.faults.harness import FaultWorld
from tests.faults.place import Place
from tests.faults.report import report
from tests.helpers import wait_until


@pytest.fixture
def place(place: Place) -> Place:
    return replace(place, num_prompts=300)


def test_a_worker_that_comes_after_a_flush_finds_weights(world: FaultWorld, client: redis.Redis) -> None:
    learner, worker = world.start_learner(), world.start_worker(name="before")
    wait_until(lambda: world.newest_checkpoint().step >= 2, description="the run is at work")
    worker.kill()
    client.flushall()
    world.start_worker(name="after")
    learner.ends_with(0)
    report("T10 weights", world.audit(), injections=2)
