"""T14: a group that kills the rank which trains it is quarantined, and its neighbours are trained."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.faults.harness import FaultWorld
from tests.faults.place import GROUPS_PER_STEP, Place
from tests.faults.report import report

_DEADLY = 8
_MOST_DEATHS = 3


@pytest.fixture
def place(place: Place) -> Place:
    return replace(place, deadly_ticket=_DEADLY)


def test_a_group_that_kills_its_rank_is_quarantined_within_three_restarts(world: FaultWorld) -> None:
    world.start_worker()
    deaths = 0
    while (code := world.start_learner().ended()) == -signal.SIGKILL and deaths < _MOST_DEATHS:
        deaths += 1
    assert (code, deaths) == (0, _MOST_DEATHS)
    audit = world.audit()
    assert audit.dropped["quarantined"] == 1
    assert audit.outstanding == 0
    assert audit.trained >= world.place.num_prompts // 2 > GROUPS_PER_STEP
    report("T14", audit, injections=deaths, quarantined=audit.dropped["quarantined"])
