"""What the learner makes of workers that reject the newest version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import Fenced, TrainingError, TransportError
from streamrl.learner.groups.plan import Kind, Outcome, Plan
from streamrl.learner.publishing.newest import Rejections
from streamrl.telemetry.progress import Progress, Report, Wait
from streamrl.versions import make_version
from tests.conductor_world import Scene, published
from tests.feed_world import Clock

V4, V5 = make_version(1, 4), make_version(1, 5)
WHY = "the engine's log-probs of the canary are 1.9 away from the learner's, 0.2 is let pass"
BORNE_S, BORNE_WITH_STARTERS_S = 180.0, 270.0  # of 300 s
STARTING: dict[str, Any] = {}
SERVES = {"version": V5, "rejected": "", "rejected_version": ""}
REJECTS = {"version": V4, "rejected": WHY, "rejected_version": "1.5"}


class World:
    """Reports of workers at a clock of its own; those that live write theirs anew before each look."""

    def __init__(self, **workers: dict[str, Any]) -> None:
        self.clock = Clock()
        self.workers = workers
        self.silent: set[str] = set()
        self.trouble: Exception | None = None
        self._reports: dict[str, Report] = {}
        self.rejections = Rejections(self._read, give_up_after_s=300.0, clock=self.clock)

    def _read(self) -> tuple[float, list[Report]]:
        if self.trouble is not None:
            raise self.trouble
        reports = {name: report for name, report in self._reports.items() if name in self.silent}
        for name, detail in self.workers.items():
            if name not in self.silent:
                made = Progress(part=f"worker/{name}", role="worker", clock=self.clock).report()
                reports[name] = replace(made, detail=detail)
        self._reports = reports
        learner = Progress(part="learner/0", role="learner", clock=self.clock).report()
        return self.clock(), [learner, *reports.values()]

    def pass_by(self, seconds: float, *, newest: int = V5) -> None:
        """With a look each second."""
        for _ in range(int(seconds)):
            self.rejections.check(newest)
            self.clock.advance(1.0)
        self.rejections.check(newest)


def test_a_version_that_every_worker_rejects_ends_the_run_within_minutes_and_the_error_tells_what_to_do() -> None:
    world = World(a=REJECTS, b=REJECTS, c=REJECTS)
    world.pass_by(BORNE_S - 10)
    with pytest.raises(TrainingError) as caught:
        world.pass_by(20)
    told = str(caught.value)
    for part in ("all 3 workers reject version 1.5", "worker/a", WHY, "weights.give_up_after_s", "worker.engine="):
        assert part in told


def test_a_lone_worker_is_all_workers() -> None:
    world = World(a=REJECTS)
    with pytest.raises(TrainingError, match=r"the only worker rejects version 1\.5"):
        world.pass_by(BORNE_S + 10)


def test_one_worker_that_serves_is_enough_to_go_on() -> None:
    World(a=REJECTS, b=SERVES, c=REJECTS).pass_by(2000)


def test_a_worker_that_serves_an_older_version_is_still_on_its_way() -> None:
    World(a=REJECTS, b={**SERVES, "version": V4}).pass_by(2000)


def test_a_worker_that_starts_delays_the_end_but_not_for_ever() -> None:
    world = World(a=REJECTS, b=STARTING)
    world.pass_by(BORNE_WITH_STARTERS_S - 10)
    with pytest.raises(TrainingError, match=r"1 of 2 workers reject, and no other serves, version 1\.5"):
        world.pass_by(20)


def test_before_any_worker_rejects_those_that_start_are_waited_for() -> None:
    World(a=STARTING).pass_by(2000)


def test_workers_that_are_silent_do_not_count() -> None:
    world = World(a=REJECTS, b=SERVES)
    world.pass_by(10)
    world.silent = {"b"}
    with pytest.raises(TrainingError, match="the only worker"):
        world.pass_by(BORNE_S + 30)


def test_a_worker_of_yesterday_does_not_count_at_first_sight_either() -> None:
    world = World(a=SERVES)
    world.rejections.check(V5)
    world.silent, world.workers = {"a"}, {"a": SERVES, "b": REJECTS}
    world.clock.advance(86_400)
    world.rejections = Rejections(world._read, give_up_after_s=300.0, clock=world.clock)
    with pytest.raises(TrainingError, match="the only worker"):
        world.pass_by(BORNE_S + 10)


def test_a_version_of_before_that_was_rejected_says_nothing_of_the_newest() -> None:
    world = World(a={**REJECTS, "rejected_version": "1.4"})
    world.pass_by(2000)


def test_with_each_version_the_time_begins_anew() -> None:
    world = World(a={**REJECTS, "rejected_version": "1.4"})
    world.pass_by(BORNE_S - 10, newest=V4)
    world.workers = {"a": REJECTS}
    world.pass_by(BORNE_S - 10)
    with pytest.raises(TrainingError):
        world.pass_by(20)


def test_workers_that_end_and_are_started_again_do_not_begin_the_time_anew() -> None:
    world = World(a=REJECTS)
    world.pass_by(BORNE_S - 30)
    world.workers = {}
    world.pass_by(10)
    world.workers = {"a": STARTING}
    world.pass_by(60)
    world.workers = {"a": REJECTS}
    with pytest.raises(TrainingError):
        world.pass_by(5)


def test_a_worker_that_proves_the_version_after_all_begins_the_time_anew() -> None:
    world = World(a=REJECTS)
    world.pass_by(BORNE_S - 20)
    world.workers = {"a": SERVES}
    world.pass_by(10)
    world.workers = {"a": REJECTS}
    world.pass_by(BORNE_S - 20)


def test_while_redis_does_not_answer_nobody_is_judged() -> None:
    world = World(a=REJECTS)
    world.trouble = TransportError("away")
    world.pass_by(2000)
    world.trouble = Fenced("a newer term")
    with pytest.raises(Fenced):
        world.pass_by(10)


def scene(tmp_path: Path, *answers: Plan | None) -> Scene:
    made = Scene(tmp_path, *answers)
    made.stream.manifests = {V5}
    made.conductor.note_published(published(V5))
    report = Progress(part="worker/a", role="worker", clock=made.clock).report()
    made.stream.told = [replace(report, detail=REJECTS)]
    return made


def passes(scene: Scene, seconds: float) -> None:
    scene.clock.advance(seconds)
    scene.stream.told = [replace(report, at=scene.clock()) for report in scene.stream.told]


def test_the_conductor_looks_while_it_waits_for_groups(tmp_path: Path) -> None:
    there = scene(tmp_path, None, Plan(kind=Kind.STEP, step=0), None)
    assert there.kinds(0) == [Kind.IDLE]
    passes(there, BORNE_S)
    assert there.kinds(0) == [Kind.STEP], "what is there is trained"
    with pytest.raises(TrainingError, match=r"version 1\.5"):
        there.kinds(0)


def test_the_conductor_looks_while_it_waits_for_a_validation(tmp_path: Path) -> None:
    there = scene(tmp_path)
    there.validation.look_for_ever()
    assert there.conductor.poll_validation() is Outcome.WAITING
    passes(there, BORNE_S)
    with pytest.raises(TrainingError, match=r"version 1\.5"):
        there.conductor.poll_validation()


def test_a_run_that_is_paused_or_waits_for_stragglers_is_not_ended(tmp_path: Path) -> None:
    there = scene(tmp_path, *[None] * 3)
    assert there.kinds(0) == [Kind.IDLE]
    passes(there, BORNE_S)
    there.feed.control = "pause"
    assert there.kinds(0) == [Kind.IDLE]
    there.feed.control, there.feed.waits_for = "run", Wait.STRAGGLERS
    assert there.kinds(0) == [Kind.IDLE]
