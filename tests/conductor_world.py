"""Shared by the conductor's tests: rank 0's half of the loop, with doubles for everything that it uses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamrl.config import schema
from streamrl.learner.admission.start import Start
from streamrl.learner.checkpoints.checkpoint import CheckpointRoot
from streamrl.learner.checkpoints.sealed import Files
from streamrl.learner.checkpoints.terms import CheckpointName
from streamrl.learner.conductor import Conductor
from streamrl.learner.groups.ledger import FeedState
from streamrl.learner.groups.plan import GroupCheck, Kind, Plan
from streamrl.learner.groups.prompts import Prompt
from streamrl.learner.loading.tokenizer import TokenizerInfo
from streamrl.learner.metrics.record import Timers, ValidationResult
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.learner.process.ranks import World
from streamrl.learner.process.watchdog import Watchdog
from streamrl.learner.publishing.shipping import Published
from streamrl.learner.rank_context import RankContext
from streamrl.telemetry.progress import Progress, Report, Wait
from streamrl.versions import make_version
from tests.feed_world import Clock, make_prompts
from tests.helpers import make_sample
from tests.learner_cases import learner_config

RESULT = ValidationResult(
    step=3,
    version=make_version(1, 3),
    complete=True,
    metrics={"val_rollouts/rewards": 0.5, "val_rollouts/num_prompts": 1.0},
    shown=(
        (
            Prompt(line=1, text="say", token_ids=np.array([4], dtype=np.int32), fields={"n": 1}),
            make_sample(num_tokens=2, token_ids=np.array([5, 6], dtype=np.int32), reward=0.5),
        ),
    ),
)


class FakeFeed:
    """Returns these answers in order; an error is raised."""

    waits_for = Wait.GROUPS
    control = "run"

    def __init__(self, *answers: Plan | Exception | None) -> None:
        self._answers = list(answers)
        self._frees = [True]
        self.now = FeedState()
        self.told: list[FeedState] = []  # states of committed checkpoints

    def listen(self) -> None: ...

    def request_commit(self) -> bool:
        return self._frees.pop() if self._frees else False

    def note_version(self, version: int, step: int) -> None: ...

    def plan(self, *, step: int, world_size: int, timeout_s: float) -> Plan | None:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def settle(self, plan: Plan, verdicts: Sequence[GroupCheck], *, trained: bool) -> None: ...

    def num_places(self, end: int) -> int:
        return end

    def metrics(self) -> dict[str, float]:
        return {"stream/issued": 7.0}

    def state(self) -> FeedState:
        return self.now

    def committed(self, state: FeedState, *, step: int) -> None:
        self.told.append(state)


class FakeValidation:
    """Has its result at the second poll."""

    def __init__(self) -> None:
        self._looks_left = 2
        self.started: list[int] = []
        self.paused: list[bool] = []  # at each poll
        self.trouble: Exception | None = None

    def look_for_ever(self) -> None:
        self._looks_left = 1 << 30

    def start(self, *, step: int, version: int) -> None:
        self.started.append(step)
        if self.trouble is not None:
            raise self.trouble

    @property
    def running(self) -> bool:
        return self._looks_left > 0

    def poll(self, *, wait_s: float, paused: bool) -> ValidationResult | None:
        self._looks_left -= 1
        self.paused.append(paused)
        return None if self._looks_left else RESULT


class FakeTokenizer:
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class FakeStream:
    """Has these manifests; an error is raised."""

    def __init__(self) -> None:
        self.records: list[tuple[int, Mapping[str, float]]] = []
        self.told: list[Report] = []
        self.manifests: set[int] = set()
        self.trouble: Exception | None = None
        self.looks = 0

    def has_manifests(self, versions: Sequence[int]) -> bool:
        self.looks += 1
        if self.trouble is not None:
            raise self.trouble
        return self.manifests.issuperset(versions)

    def event(self, kind: str, **detail: str | int | float) -> None: ...

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((step, metrics))

    def reports(self) -> tuple[float, Sequence[Report]]:
        return 1000.0, self.told


class Wire:
    """Connects two ranks: what the first broadcasts, the other receives.

    They take turns, so what one says in a reduction reaches the other with its next one.
    """

    size = data_size = 2

    def __init__(self) -> None:
        self._said: list[bytes] = []
        self._largest: npt.NDArray[np.float64] = np.array([0.0])

    def broadcast(self, data: bytes | None) -> bytes:
        if data is None:
            return self._said.pop(0)
        self._said.append(data)
        return data

    def largest(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        self._largest = np.maximum(self._largest, values)
        return self._largest


ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def surroundings(config: schema.Config, **changes: Any) -> RankContext:
    """The context of a single rank; `changes` replace its values."""
    tokenizer_info = TokenizerInfo(tokenizer=FakeTokenizer(), end_ids=(1,), vocabulary=50, fingerprint="model")
    given = {
        "config": config,
        "world": ALONE,
        "patient": ALONE,
        "tokenizer_info": tokenizer_info,
        "progress": Progress(part="learner/0", role="learner"),
        "watchdog": Watchdog(limit_s=300.0, at_disk_s=300.0),
        "timers": Timers(),
        "stop": threading.Event(),
        "job_began": 0.0,
    }
    return RankContext(**{**given, **changes})


def start_of(**changes: Any) -> Start:
    """A start from the beginning."""
    given = {
        "run_uid": "run",
        "term": 1,
        "checkpoint": None,
        "lineage": {1: None},
        "step": 0,
        "consumed_samples": 0,
        "first_step": 0,
        "total_steps": 0,
        "steps_of_data": 0,
        "canary_ids": (),
    }
    return Start(**{**given, **changes})


class Scene:
    def __init__(
        self,
        folder: Path,
        *answers: Plan | Exception | None,
        feed: Any = None,  # None: one with these answers
        validation: Any = None,
        checkpoint: schema.Checkpoint | None = None,
        world: Any = ALONE,
        **training: Any,
    ) -> None:
        config = learner_config(
            folder, dir=folder, checkpoint=checkpoint or schema.Checkpoint(), training=schema.Training(**training)
        )
        config.folder.mkdir()
        self.folder, self.clock = config.folder, Clock()
        self.stream, self.feed = FakeStream(), feed or FakeFeed(*answers)
        self.validation = validation or FakeValidation()
        self.checkpoints = CheckpointRoot(config.folder)
        self.progress = Progress(part="learner/0", role="learner", timer=self.clock)
        around = surroundings(config, world=world, job_began=self.clock() - 100.0, progress=self.progress)
        self.stop = around.stop
        self.conductor = Conductor(
            around,
            start_of(),
            prompts=make_prompts(3),
            stream=self.stream,
            feed=self.feed,
            validation=self.validation,
            lease=LeaseKeeper(lambda: None, lease_s=1.0),
            clock=self.clock,
        )

    def kinds(self, *steps: int) -> list[Kind]:
        return [self.conductor.next_plan(step).kind for step in steps]


def commit(conductor: Conductor, name: CheckpointName, files: Files) -> None:
    """Commit completely, all steps at once."""
    begun = conductor.begin_commit(name, consumed_samples=0)
    begun.seal(files)
    begun.announce()
    begun.prune()


def published(version: int, base: int = 0) -> Published:
    return Published(version=version, step=version, base=base, num_bytes=1, changed_fraction=1.0)
