"""T24: a process dies at every named crash point, or stops there and wakes as a zombie; nothing is lost or twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import redis

from streamrl.crashpoints import POINTS, Point
from streamrl.ops.audit import Audit
from tests.faults.harness import FENCED, REFUSED, FaultWorld, Part
from tests.faults.place import Place
from tests.faults.report import report
from tests.helpers import wait_until

OF_WORKERS = sorted(p for p in POINTS if p.startswith(("ticket.", "worker.", "group.ready", "group.delivered")))
OF_SHARING = sorted(p for p in POINTS if p.startswith("share."))  # tests/faults/test_sharing.py
OF_LEARNERS = sorted(POINTS - set(OF_WORKERS) - set(OF_SHARING))
IN_A_DIRECTORY = ("blob.aside", "blob.renamed")
AT_SIGTERM = ("ticket.handed_back", "worker.left")
ONCE = ("lease.taken", "run.recorded", "term.recorded", "claim.written", "restore.written", "release.written")
ONCE += ("dead.written", "retry.counted", "reconcile.deleted", "reconcile.counted", "prune.aside", "prune.removed")
ONCE += ("letters.removed",)
OF_WHAT_IS_TOO_MUCH = ("reconcile.deleted", "letters.removed")
ONCE += AT_SIGTERM
_FOR_EVER_S = 3600.0
BEFORE_THE_EPOCH = ("lease.taken", "run.recorded", "file.aside")  # its second passing is the term's record


def passing(point: str) -> str:
    """The first passing where there is but one, else the second: the run is at work by then."""
    return f"{point}:{1 if point in ONCE else 2}"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, run_name: str, redis_url: str) -> Place:
    point = request.getfixturevalue("point")
    store = f"file:{tmp_path / 'blobs'}" if point in IN_A_DIRECTORY else "redis:"
    pace_s = 0.1 if point in OF_WORKERS else 0.01  # so that they have tickets in hand
    curriculum = point == "draws.written"
    return Place(
        folder=tmp_path,
        name=run_name,
        url=redis_url,
        store=store,
        num_prompts=18,
        pace_s=pace_s,
        curriculum=curriculum,
    )


def finished(world: FaultWorld, point: str) -> Audit:
    """Every ticket has ended, whatever it took."""
    audit = world.audit()
    report(f"T24 {point}", audit, injections=1)
    assert audit.issued >= world.place.num_prompts
    assert audit.outstanding == 0
    return audit


@pytest.mark.parametrize("point", OF_LEARNERS)
def test_a_learner_that_dies_at_a_point_is_gone_on_from(world: FaultWorld, client: redis.Redis, point: Point) -> None:
    superfluous = point in OF_WHAT_IS_TOO_MUCH
    if superfluous:
        make_tickets_superfluous(world, client)
    else:
        world.start_worker()
    world.start_learner(crash_at=passing(point)).ends_with(-signal.SIGKILL)
    if superfluous:  # a worker that is there before answers them, and none is
        world.start_worker()
    world.start_learner().ends_with(0)
    finished(world, point)


@pytest.mark.parametrize("point", OF_LEARNERS)
def test_a_learner_that_stops_at_a_point_wakes_as_a_zombie_without_effect(
    world: FaultWorld, client: redis.Redis, point: Point
) -> None:
    superfluous = point in OF_WHAT_IS_TOO_MUCH
    if superfluous:
        make_tickets_superfluous(world, client)
    else:
        world.start_worker()
    zombie = world.start_learner(crash_at=f"{passing(point)}:stop")
    zombie.wait_until_stopped()
    if superfluous:  # a worker that is there before answers them, and none is
        world.start_worker()
    before = term(client, world)
    second = world.start_learner(holder="another", takeover=True)
    wait_until(
        lambda: term(client, world) > before and world.newest_checkpoint().term > before,
        description="the second commits",
    )
    zombie.send(signal.SIGCONT)
    zombie.ends_with(0 if point == "release.written" else REFUSED if point in BEFORE_THE_EPOCH else FENCED)
    second.ends_with(0)
    finished(world, point)


@pytest.mark.parametrize("point", OF_WORKERS)
def test_a_worker_that_dies_at_a_point_leaves_its_tickets_to_others(
    world: FaultWorld, client: redis.Redis, point: Point
) -> None:
    learner = world.start_learner()
    armed = start_armed_worker(world, client, point, passing(point))
    armed.ends_with(-signal.SIGKILL)
    world.start_worker(name="other")
    learner.ends_with(0)
    finished(world, point)


@pytest.mark.parametrize("point", OF_WORKERS)
def test_a_worker_that_stops_at_a_point_delivers_nothing_twice_when_it_wakes(
    world: FaultWorld, client: redis.Redis, point: Point
) -> None:
    learner = world.start_learner()
    armed = start_armed_worker(world, client, point, f"{passing(point)}:stop")
    armed.wait_until_stopped()
    world.start_worker(name="other")
    learner.ends_with(0)
    armed.send(signal.SIGCONT)
    armed.ends_with(0)
    finished(world, point)


def start_armed_worker(world: FaultWorld, client: redis.Redis, point: str, crash_at: str) -> Part:
    """What it passes when it is told to end, it passes with tickets in hand that it cannot finish."""
    if point not in AT_SIGTERM:
        return world.start_worker(name="armed", crash_at=crash_at)
    armed = world.start_worker(name="armed", crash_at=crash_at, pace_s=_FOR_EVER_S)
    wait_until(lambda: world.held_by(client, "armed"), description="it holds tickets")
    armed.send(signal.SIGTERM)
    return armed


def make_tickets_superfluous(world: FaultWorld, client: redis.Redis) -> None:
    """A learner dies, and each ticket that waits stands twice in the stream; and among the dead letters, too."""
    world.start_learner(crash_at="issue.written").ends_with(-signal.SIGKILL)
    tickets = world.keys.tickets("train")
    for _, fields in client.xrange(tickets):
        client.xadd(tickets, fields)
        client.xadd(world.keys.dead, fields)


def term(client: redis.Redis, world: FaultWorld) -> int:
    """As Redis knows it."""
    return int(client.hget(world.keys.meta, "term") or 0)
