"""What rank 0 decides for all ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.checkpoints.checkpoint import CheckpointRoot
from learner.conductor import Conductor
from learner.lease import LeaseKeeper
from learner.metrics.record import Recorder, Timers
from learner.publishing.publish import Published
from learner.stream.plan import Kind, Plan
from learner.suspects import Suspects
from learner.validation import Answer, ValidationResult
from streamrl.config import schema
from streamrl.errors import Fenced, TransportError
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import make_version
from tests.feed_world import Clock, make_prompts
from tests.learner_cases import learner_config

RESULT = ValidationResult(
    step=3,
    version=make_version(1, 3),
    num_prompts=1,
    num_answered=1,
    num_failed=0,
    duration_s=1.0,
    reward=0.5,
    shown=(Answer(prompt="say", fields={"n": 1}, token_ids=np.array([5, 6], dtype=np.int32), reward=0.5),),
)


class FakeFeed:
    """Gives these answers in order; an error is raised."""

    waits_for = Wait.GROUPS
    control = "run"

    def __init__(self, *answers: Plan | Exception | None) -> None:
        self._answers = list(answers)

    def listen(self) -> None: ...

    def note_version(self, version: int, step: int) -> None: ...

    def plan(self, *, step: int, world_size: int, timeout_s: float) -> Plan | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def metrics(self) -> dict[str, float]:
        return {"stream/issued": 7.0}


class FakeValidation:
    """Has its result at the second look."""

    def __init__(self) -> None:
        self._looks_left = 2
        self.started: list[int] = []

    def start(self, *, step: int, version: int) -> None:
        self.started.append(step)

    @property
    def running(self) -> bool:
        return self._looks_left > 0

    def poll(self, *, wait_s: float) -> ValidationResult | None:
        self._looks_left -= 1
        return None if self._looks_left else RESULT


class FakeJournal:
    def __init__(self) -> None:
        self.records: list[tuple[int, Mapping[str, float]]] = []

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((step, metrics))


class FakeTokenizer:
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class FakeStream:
    """Has these manifests; an error is raised."""

    def __init__(self) -> None:
        self.manifests: set[int] = set()
        self.trouble: Exception | None = None
        self.looks = 0

    def has_manifests(self, versions: Sequence[int]) -> bool:
        self.looks += 1
        if self.trouble is not None:
            raise self.trouble
        return self.manifests.issuperset(versions)


class Scene:
    def __init__(self, folder: Path, *answers: Plan | Exception | None, **training: Any) -> None:
        config = learner_config(folder, dir=folder, training=schema.Training(**training))
        config.folder.mkdir()
        self.folder, self.stop, self.clock, self.journal = config.folder, threading.Event(), Clock(), FakeJournal()
        self.stream = FakeStream()
        self.validation = FakeValidation()
        self.conductor = Conductor(
            config=config,
            world_size=1,
            run_uid="run",
            prompts=make_prompts(3),
            stream=self.stream,
            feed=FakeFeed(*answers),
            validation=self.validation,
            checkpoints=CheckpointRoot(folder),
            lease=LeaseKeeper(lambda: None, lease_s=1.0),
            recorder=Recorder(folder=config.folder, journal=self.journal, decoder=FakeTokenizer(), epoch=1),
            suspects=Suspects(config.folder, epoch=1),
            progress=Progress(part="learner/0", role="learner"),
            timers=Timers(),
            stop=self.stop,
            elapsed_s=100.0,
            clock=self.clock,
        )

    def kinds(self, *steps: int) -> list[Kind]:
        return [self.conductor.next_plan(step).kind for step in steps]


def test_the_feeds_plan_is_handed_on_and_nothing_is_idle(tmp_path: Path) -> None:
    plan = Plan(kind=Kind.STEP, step=0)
    scene = Scene(tmp_path, None, plan)
    assert scene.conductor.next_plan(0).kind is Kind.IDLE
    assert scene.conductor.next_plan(0) is plan


def test_a_redis_that_is_away_for_a_moment_makes_an_idle_round(tmp_path: Path) -> None:
    assert Scene(tmp_path, TransportError("away")).kinds(0) == [Kind.IDLE]


def test_a_newer_learner_ends_this_one(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        Scene(tmp_path, Fenced("a newer epoch")).kinds(0)


def test_a_signal_stops_before_anything_else(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.stop.set()
    assert scene.kinds(0) == [Kind.STOP]
    assert scene.conductor.next_while_validating(0).kind is Kind.STOP
    assert scene.conductor.next_after_pause(0).kind is Kind.STOP
    assert scene.conductor.next_while_publishing(0).kind is Kind.STOP


def test_the_run_ends_at_its_last_step(tmp_path: Path) -> None:
    assert Scene(tmp_path, None, max_steps=5).kinds(4, 5) == [Kind.IDLE, Kind.END]


def test_the_run_ends_when_its_time_is_over_earlier_processes_included(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None, max_time="00:00:02:00")
    assert scene.kinds(0) == [Kind.IDLE]
    scene.clock.advance(20.0)
    assert scene.kinds(0) == [Kind.END]


def test_waiting_for_validation_is_idle_until_the_result_which_is_recorded(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert [scene.conductor.next_while_validating(3).kind for _ in range(2)] == [Kind.IDLE, Kind.END]
    [(step, metrics)] = scene.journal.records
    assert (step, metrics["val_rollouts/rewards"]) == (3, 0.5)
    [line] = (scene.folder / "validation.jsonl").read_text().splitlines()
    assert json.loads(line)["samples"] == [{"prompt": "say", "completion": "5 6", "reward": 0.5, "fields": {"n": 1}}]


def test_a_newer_version_is_validated_when_the_one_before_is_done_and_none_twice(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    older, newer = (published(make_version(1, step)) for step in (3, 4))
    scene.conductor.start_validation(newer)
    assert scene.validation.started == [], "one of the older version still runs"
    assert [scene.conductor.next_while_validating(4).kind for _ in range(2)] == [Kind.IDLE, Kind.END]
    scene.conductor.start_validation(older)
    scene.conductor.start_validation(newer)
    assert scene.validation.started == [newer.step]


def test_validation_runs_beside_training(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None, None)
    assert scene.kinds(3, 3) == [Kind.IDLE, Kind.IDLE]
    assert len(scene.journal.records) == 1


def test_a_record_names_known_metrics_only(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.conductor.record(1, {"train_optim/loss": 0.5, "policy/ess": float("nan")})
    [line] = (scene.folder / "metrics.jsonl").read_text().splitlines()
    assert {"step": 1, "train_optim/loss": 0.5, "stream/issued": 7.0}.items() <= json.loads(line).items()
    assert "policy/ess" not in json.loads(line)
    with pytest.raises(AssertionError, match="made/up"):
        scene.conductor.record(1, {"made/up": 1.0})


def test_a_record_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    (scene.folder / "metrics.jsonl").mkdir()
    scene.conductor.record(1, {"train_optim/loss": 0.5})
    assert scene.journal.records


def published(version: int, *needs: int) -> Published:
    return Published(version=version, step=version, num_bytes=1, changed_fraction=1.0, needs=needs)


def test_weights_that_redis_lost_are_published_again_and_looked_for_now_and_then(tmp_path: Path) -> None:
    scene = Scene(tmp_path, *[None] * 4)
    scene.stream.manifests = {7, 8}
    scene.conductor.note_published(published(8, 8, 7))
    assert scene.kinds(8, 8) == [Kind.IDLE, Kind.IDLE]
    assert scene.stream.looks == 1
    scene.stream.manifests = set()
    assert scene.kinds(8) == [Kind.IDLE]
    scene.clock.advance(5.0)
    assert scene.kinds(8, 8) == [Kind.PUBLISH, Kind.IDLE]


def test_a_delta_on_a_version_that_redis_lost_is_no_use_to_anybody(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None)
    scene.stream.manifests = {9}  # announced after the rest was lost
    scene.conductor.note_published(published(9, 9, 8))
    assert scene.kinds(9) == [Kind.PUBLISH]
    scene.stream.manifests = {10}
    scene.conductor.note_published(published(10, 10))
    assert scene.kinds(9) == [Kind.IDLE]


def test_while_redis_is_away_no_weights_are_missed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, None)
    scene.stream.trouble = TransportError("away")
    scene.conductor.note_published(published(8, 8))
    assert scene.kinds(8) == [Kind.IDLE]
