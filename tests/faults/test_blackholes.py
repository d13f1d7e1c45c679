"""T7: for a while nothing moves on the road between one of the parts and Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FaultWorld
from tests.faults.place import Place
from tests.faults.report import is_judged, report
from tests.helpers import wait_until
from tests.proxy import Proxy

_PATIENCE_S = 60.0
_RESUMED_WITHIN_S = 5.0
_UNDER_WAY = 3  # steps for which the learner may have had all it needs


@pytest.fixture
def place(place: Place) -> Place:
    """Replies are given up during the blackhole, connections made again, and leases run out."""
    return replace(place, num_prompts=5000, commit_every=1, reply_timeout_s=1.0)


@pytest.mark.parametrize("part", ["learner", "worker"])
@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.long)])
def test_a_part_that_was_cut_off_goes_on_by_itself(
    world: FaultWorld,
    client: redis.Redis,
    part: str,
    seconds: float,
    record_property: Callable[[str, object], None],
) -> None:
    with Proxy(world.place.url) as proxy:
        learner = world.start_learner(url=proxy.url if part == "learner" else None)
        world.start_worker(url=proxy.url if part == "worker" else None)
        wait_until(lambda: world.newest_checkpoint().step >= 2, description="the run is at work")
        with proxy.blackhole():
            closed_at = world.newest_checkpoint().step
            until = time.monotonic() + seconds
            wait_until(lambda: time.monotonic() > until, description="the time is up", timeout_s=2 * seconds)
        before, began = world.newest_checkpoint().step, time.monotonic()
        assert before <= closed_at + _UNDER_WAY, "the blackhole let something through"
        wait_until(
            lambda: world.newest_checkpoint().step > before + _UNDER_WAY,
            description=f"the {part} goes on",
            timeout_s=_PATIENCE_S,
        )
        recovery_s = time.monotonic() - began
        set_control(client, world.keys, "drain", by="the test")
        learner.ends_with(0)
    audit = world.audit()
    assert audit.outstanding == 0
    record_property("figure", f"after {seconds:g} s without Redis the {part} goes on within {recovery_s:.1f} s")
    report(f"T7 {part}", audit, injections=1, recovery_s=recovery_s, cut_off_s=seconds)
    assert recovery_s <= _RESUMED_WITHIN_S or not is_judged()
