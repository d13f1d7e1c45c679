"""T17: one worker serves the first version for ever, and answers tickets that ask for younger ones: what is past the
limit is dropped, to the last group, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import redis

from streamrl.learner.groups.ledger import TRAINED
from streamrl.protocol.transport.operator import set_control
from streamrl.versions import number_of
from tests.faults.harness import FaultWorld, Part
from tests.faults.place import Place
from tests.faults.report import report
from tests.faults.stand_in_learner import STEP
from tests.faults.stand_in_worker import Delivery, Habits
from tests.helpers import wait_until

_FAR_BEHIND = 50  # steps, and so versions: there is one after each
LIMITS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "keep": ({"max_steps": 2, "hard_limit_steps": 10}, 10),
    "drop": ({"max_steps": 2}, 2),
    "mask": ({"max_steps": 2}, 2),
    "wait": ({"max_steps": 2, "wait_s": 5.0}, 2),
}


@pytest.fixture(params=["keep", *(pytest.param(stale, marks=pytest.mark.long) for stale in ("drop", "mask", "wait"))])
def stale(request: pytest.FixtureRequest) -> str:
    """What happens past the limit."""
    return str(request.param)


@pytest.fixture
def place(place: Place, stale: str) -> Place:
    settings, _ = LIMITS[stale]
    return replace(place, num_prompts=10_000, pace_s=0.005, lag={**settings, "stale": stale})


def test_of_a_worker_far_behind_what_is_past_the_limit_is_dropped_and_counted_exactly(
    world: FaultWorld, client: redis.Redis, stale: str
) -> None:
    learner = world.start_learner()
    workers = [world.start_worker(name="sound"), world.start_worker(habits=Habits(keeps_first_version=True))]
    wait_until(
        lambda: learner.output.count(STEP) > _FAR_BEHIND,
        description=f"{_FAR_BEHIND} steps\n{learner.output[-2000:]}",
        timeout_s=240,
    )
    set_control(client, world.keys, "drain", by="the test")
    for part in (learner, *workers):
        part.ends_with(0)

    lags, endings = lags_of(world, workers, by_youngest=stale == "mask"), world.endings()
    _, limit = LIMITS[stale]
    past = {ticket for ticket, lag in lags.items() if lag > limit}
    dropped = {ticket for ticket, ending in endings.items() if ending.outcome == "dropped/stale"}
    trained_past = sum(endings[ticket].outcome == TRAINED for ticket in past)
    audit = world.audit()
    counts = {"past_limit_trained": trained_past, "dropped": len(dropped), "furthest_behind": max(lags.values())}
    report(f"T17 {stale}", audit, injections=len(past), **counts)
    assert trained_past == 0
    assert dropped == past
    assert audit.dropped["stale"] == len(past)
    assert max(lags.values()) >= _FAR_BEHIND
    assert any(0 < lag <= limit and endings[ticket].outcome == TRAINED for ticket, lag in lags.items())


def lags_of(world: FaultWorld, workers: list[Part], *, by_youngest: bool) -> dict[int, int]:
    """By ticket that was answered: how many steps had been made since the weights that made it, at its end."""
    endings, deliveries = world.endings(), [one for worker in workers for one in Delivery.all_in(worker.output)]
    versions = {one.ticket: one.youngest if by_youngest else one.oldest for one in deliveries}
    assert len(versions) == len(deliveries), "each was delivered once"
    # The only learner of the run publishes once before its first step, and once after each.
    return {ticket: endings[ticket].step - 1 - number_of(version) for ticket, version in versions.items()}
