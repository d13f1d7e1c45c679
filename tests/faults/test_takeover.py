"""T4: who may learn a run when a learner stops, another comes, and the first wakes."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
import redis

from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FENCED, REFUSED, FaultWorld
from tests.faults.place import Place
from tests.faults.report import report
from tests.helpers import wait_until

_MARGIN_S = 20.0  # to start a learner on a busy machine


@pytest.fixture
def place(place: Place) -> Place:
    """Weights in a directory, so that every file that must not be spoilt is in the folder."""
    return replace(place, store=f"file:{place.folder / 'blobs'}")


def state_of(client: redis.Redis) -> dict[bytes, bytes | None]:
    """Every key on the server."""
    return {key: client.dump(key) for key in client.scan_iter(count=1000)}


def test_a_learner_that_slept_past_its_lease_writes_nothing_any_more(world: FaultWorld, client: redis.Redis) -> None:
    worker = world.start_worker()
    zombie = world.start_learner(holder="the first")
    wait_until(lambda: world.newest_checkpoint().step, description="the first has made a checkpoint")
    zombie.send(signal.SIGSTOP)
    zombie.wait_until_stopped()
    stopped_at, wasted_from = time.monotonic(), world.newest_checkpoint()

    second = world.start_learner(holder="the second")
    wait_until(lambda: world.newest_checkpoint() > wasted_from, description="the second goes on")
    recovery_s = time.monotonic() - stopped_at
    assert recovery_s <= world.place.learner_lease_s + _MARGIN_S
    second.ends_with(0)
    worker.ends_with(0)
    wait_until(lambda: not client.exists(world.keys.lease), description="the run is released")

    files, keys = world.files(), state_of(client)
    zombie.send(signal.SIGCONT)
    zombie.ends_with(FENCED)

    assert state_of(client) == keys, "the zombie changed Redis"
    assert {name: data for name, data in world.files().items() if name in files} == files, "the zombie spoilt a file"
    report("T4 slept", world.audit(), injections=1, recovery_s=recovery_s, zombie_writes=0)


def test_a_second_learner_is_refused_without_a_trace_while_the_first_is_healthy(
    world: FaultWorld, client: redis.Redis
) -> None:
    set_control(client, world.keys, "pause", by="the test")
    world.start_worker()
    first = world.start_learner(holder="the first")
    wait_until(lambda: client.exists(world.keys.meta), description="the first is the learner")

    world.start_learner(holder="the second").ends_with(REFUSED)

    assert [path.name for path in (world.place.run_folder / "terms").iterdir()] == ["000001"]
    set_control(client, world.keys, "run", by="the test")
    first.ends_with(0)
    report("T4 refused", world.audit(), injections=1, admitted=0)


def test_an_operator_may_replace_a_healthy_learner_which_then_ends(world: FaultWorld, client: redis.Redis) -> None:
    world.start_worker()
    first = world.start_learner(holder="the first")
    wait_until(lambda: client.exists(world.keys.meta), description="the first is the learner")
    second = world.start_learner(holder="the second", takeover=True)
    first.ends_with(FENCED)
    second.ends_with(0)
    report("T4 takeover", world.audit(), injections=1)
