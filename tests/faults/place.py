"""The setting of a run of stand-ins: what its processes are given when they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.config import schema
from tests.feed_world import make_config

GROUPS_PER_STEP = 3
FAILING_TICKET = 4  # its samples always fail, except with a worker of other habits
_DEADLINE_S = 240  # no stand-in lives longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    folder: Path  # of runs
    name: str
    url: str
    store: str = "redis:"  # for the weights
    num_prompts: int = 21
    max_epochs: int = 1  # over the prompts
    pace_s: float = 0.02  # duration of a sample
    step_s: float = 0.0  # duration of a step, during which what it trains stays in the stream
    worker_lease_s: float = 0.4
    learner_lease_s: float = 1.0
    commit_every: int = 2  # steps
    reply_timeout_s: float = 5.0  # of Redis
    idle_timeout_s: float = 600.0  # a learner without a group for this long ends
    failing_every: int | None = None  # from the failing ticket on, every so many tickets another one fails
    curriculum: bool = False
    deadly_ticket: int | None = None  # its group kills the learner that trains it
    lag: Mapping[str, Any] = field(default_factory=dict)  # of the configuration; by default one step
    deadline_s: int = _DEADLINE_S
    passwords: Path | None = None  # a folder with a file for each role, as from `streamrl redis acl`
    environment: Mapping[str, Any] = field(default_factory=dict)  # of the configuration; empty: single-turn answers

    def config(self) -> schema.Config:
        config = make_config(
            data={"curriculum": self.curriculum},
            training={
                "groups_per_step": GROUPS_PER_STEP,
                "max_epochs": self.max_epochs,
                **({"max_failed_in_row": 10_000} if self.environment else {}),  # most rollouts may be bad
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
