"""Where a run of stand-ins takes place: what its processes are told when they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.config import schema
from tests.feed_world import make_config

GROUPS_PER_STEP = 3
FAILING_TICKET = 4  # its samples fail, however often it is tried, but with a worker of other habits
_DEADLINE_S = 240  # no stand-in lives longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    folder: Path  # of runs
    name: str
    url: str
    store: str = "redis:"  # where the weights go
    num_prompts: int = 21
    max_epochs: int = 1  # over the prompts
    pace_s: float = 0.02  # what a sample takes
    step_s: float = 0.0  # what a step takes: for so long, at least, what it trains lies in the stream
    worker_lease_s: float = 0.4
    learner_lease_s: float = 1.0
    commit_every: int = 2  # steps
    reply_timeout_s: float = 5.0  # of Redis
    idle_timeout_s: float = 600.0  # a learner ends that gets no group for so long
    failing_every: int | None = None  # so many tickets one more fails, from the failing one on
    curriculum: bool = False
    deadly_ticket: int | None = None  # its group kills the learner that trains it
    lag: Mapping[str, Any] = field(default_factory=dict)  # of the configuration; else one step
    deadline_s: int = _DEADLINE_S
    passwords: Path | None = None  # a folder with a file for each role, as `streamrl redis acl` has it
    environment: Mapping[str, Any] = field(default_factory=dict)  # of the configuration; none: answers of one turn

    def config(self) -> schema.Config:
        config = make_config(
            data={"curriculum": self.curriculum},
            training={
                "groups_per_step": GROUPS_PER_STEP,
                "max_epochs": self.max_epochs,
                **({"max_failed_in_row": 10_000} if self.environment else {}),  # bad ones may be the most
            },
            worker={"max_attempts": 2, "lease_s": self.worker_lease_s, "max_groups_in_flight": 4, "grace_s": 0.01},
            learner={"lease_s": self.learner_lease_s, "idle_timeout_s": self.idle_timeout_s},
            checkpoint={"every_steps": self.commit_every, "keep_last": 1},
            redis={"connect_timeout_s": 2.0, "reply_timeout_s": self.reply_timeout_s, "give_up_after_s": 60.0},
            weights={"store": self.store},
            lag=dict(self.lag),
            **({"environment": dict(self.environment)} if self.environment else {}),
        )
        return config.model_copy(update={"name": self.name, "dir": self.folder})

    @property
    def run_folder(self) -> Path:
        return self.folder / self.name
