"""T37: environments and agents of every bad kind, many of each, and workers that are killed in mid-episode."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from streamrl.protocol.transport.operator import set_control
from tests.faults import faulty_play
from tests.faults.faulty_play import KINDS, OPENED
from tests.faults.harness import FaultWorld, Part
from tests.faults.place import Place
from tests.faults.report import report
from tests.faults.stand_in_worker import LEFT, Habits
from tests.helpers import wait_until

HABITS = Habits(fails=False, repeats=False)
TIMEOUT_S = 5.0  # on a busy machine others need a second and more
LATE_S = 2 * TIMEOUT_S
PLAYS = ("Game", "agent")
TIMES = [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]


@pytest.fixture
def plays(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(place: Place, plays: str, times: int, kinds: tuple[str, ...]) -> Place:
    log = place.folder / "log"
    log.touch()
    return replace(
        place,
        num_prompts=times * len(kinds) if len(kinds) > 1 else 5000,
        worker_lease_s=3.0,
        deadline_s=1400,
        environment={
            "target": f"{Path(faulty_play.__file__)}:{plays}",
            "options": {"log": str(log), "kinds": ",".join(kinds), "late_s": LATE_S},
            "timeout_s": TIMEOUT_S,
            "memory_mb": 1024,
            "processes": 2,
        },
    )


def noted(place: Place) -> Counter[str]:
    return Counter((place.folder / "log").read_text().splitlines())


def check_what_is_left(place: Place, workers: Mapping[str, Part]) -> None:
    """Of sessions nothing; of child processes nothing; and nobody got in who should not."""
    log = noted(place)
    assert not log[OPENED]
    for worker in workers.values():
        worker.ends_with(0)
        assert f"{LEFT}0 0" in worker.output, worker.output
    pids = {int(line.split()[1]) for line in log if line.startswith("lives")}
    wait_until(lambda: not any(map(is_child, pids)), description="the processes of environments have ended")


def is_child(pid: int) -> bool:
    try:
        return b"own_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("kinds", [KINDS], ids=["every kind"])
@pytest.mark.parametrize("plays", PLAYS, indirect=True)
@pytest.mark.parametrize("times", TIMES)
def test_whatever_an_environment_does_every_ticket_ends_once(
    world: FaultWorld, place: Place, plays: str, times: int, kinds: Any, record_property: Any
) -> None:
    learner = world.start_learner()
    workers = {name: world.start_worker(name=name, habits=HABITS) for name in ("w0", "w1")}

    def has_ended() -> bool:
        for worker in workers.values():
            assert not worker.exit_code, worker.output
        return learner.exit_code is not None

    wait_until(has_ended, description="the run ends", timeout_s=240 * times)
    learner.ends_with(0)
    check_what_is_left(place, workers)
    log = noted(place)
    injected = {kind: log[kind] for kind in KINDS if kind != "good"}
    # The end of a process may take others along before they have gone wrong themselves, of two tickets all but one.
    assert all(count >= (times if times > 2 else 1) for count in injected.values()), injected
    audit = world.audit()
    assert audit.outstanding == 0
    row = report("T37", audit, injections=sum(injected.values()))
    refused = sum(count for line, count in log.items() if line.startswith("refused"))
    ends = Counter(ending.outcome for ending in world.endings().values())
    record_property(
        "figure",
        f"{plays}: {injected}; {place.num_prompts} tickets ended: {dict(ends)}; lost {row.lost}, twice {row.twice}; "
        f"{refused} attempts at sessions refused, 0 let in",
    )


@pytest.mark.parametrize("kinds", [("good",)], ids=["good ones"])
@pytest.mark.parametrize("plays", PLAYS, indirect=True)
@pytest.mark.parametrize("times", TIMES)
def test_workers_that_are_killed_in_mid_episode_cost_no_ticket(
    world: FaultWorld, place: Place, client: redis.Redis, plays: str, times: int, kinds: Any, record_property: Any
) -> None:
    learner = world.start_learner()
    workers = {f"w{n}": world.start_worker(name=f"w{n}", pace_s=0.1, habits=HABITS) for n in range(2)}
    chance = random.Random(1)
    for n in range(times):
        name = chance.choice(sorted(workers))
        wait_until(partial(world.held_by, client, name), description=f"{name} plays")
        workers.pop(name).kill()
        workers[f"w{2 + n}"] = world.start_worker(name=f"w{2 + n}", pace_s=0.1, habits=HABITS)
    step = world.newest_checkpoint()
    wait_until(lambda: world.newest_checkpoint() > step, description="the run goes on")
    set_control(client, world.keys, "drain", by="the test")
    learner.ends_with(0)
    check_what_is_left(place, workers)
    audit = world.audit()
    assert audit.outstanding == 0
    row = report("T37", audit, injections=times)
    ended = len(world.endings())
    record_property(
        "figure", f"{plays}: {times} workers killed, {ended} tickets ended, lost {row.lost}, twice {row.twice}"
    )
