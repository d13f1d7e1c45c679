"""What publishing costs the learner: steps with a version published after each, against steps without.

    step ─► step ─► ...                                     without
    step ─► copy, cast ─► step ─► copy, cast ─► ...         with: encode, store and announce run on another core

A step is a real AdamW step on only 512 tokens: the larger the step, the smaller the share of the loop's wait. The loop
has its own core; the other one runs the publisher's thread and Redis.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.learner_side import LearnerSide
from bench.measure import Rounds, Say, seconds
from bench.report import Bar, Fact, Line
from bench.training import make_model
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.learner.process.background import BackgroundThread
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.redis_store import RedisStore

_NUM_TOKENS = 512


class _Announced:
    def announce(self, announcement: Announcement, *, keep: list[int]) -> None:
        """Do nothing: there are no subscribers."""

    def amend(self, announcement: Announcement, *, keep: list[int]) -> None:
        """Do nothing: there are no late joiners."""


class _Stepping:
    def __init__(self, learner: LearnerSide) -> None:
        self._learner = learner
        self.blocked_s: list[float] = []

    def without(self) -> float:
        return seconds(self._learner.train)

    def publishing(self) -> float:
        """Time from the end of one step to the end of the next, with publishing in between."""
        return seconds(self._train_and_publish)

    def warm_up(self) -> None:
        """Publish the anchor, and touch all memory once."""
        self._learner.train()
        self._learner.publish()
        self._train_and_publish()

    def _train_and_publish(self) -> None:
        self.blocked_s.append(seconds(self._learner.begin))
        self._learner.train()
        self._learner.finish()


def bench_steps(*, quick: bool, say: Say) -> list[Line]:
    own, other = _two_cores()
    with (
        scratch_folder() as folder,
        _on(other),  # for threads and processes that start inside
        EmbeddedRedis.start(folder / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        make_model(quick=quick).save_pretrained(folder / "model")
        background = BackgroundThread("publisher")
        learner = LearnerSide(
            _config(folder / "model"),
            store=RedisStore(client, Keys("bench")),
            announcer=_Announced(),
            background=background,
            num_tokens=_NUM_TOKENS,
        )
        with background.working(join_s=60), _on(own):
            stepping = _Stepping(learner)
            stepping.warm_up()
            rounds = Rounds(
                {"without": stepping.without, "publishing": stepping.publishing},
                num_rounds=4 if quick else 8,
                say=say,
            )
    return [
        Bar(
            name="learner step publishing / without",
            value=rounds.ratio("publishing", to="without"),
            unit="x",
            goal=1.05,
            better="lower",
        ),
        Fact(name=f"learner step of {_NUM_TOKENS} tokens", value=rounds.median("without"), unit="s"),
        Fact(name="the loop waits for copy and cast", value=float(np.median(stepping.blocked_s)), unit="s"),
    ]


def _config(model: Path) -> schema.Config:
    return schema.Config(
        name="bench",
        model=schema.Model(path=str(model), dtype="float32"),
        data=schema.Data(train="unused.jsonl"),
        rewards={"unused": schema.FunctionReward(type="function", target="unused")},
    )


def _two_cores() -> tuple[set[int], set[int]]:
    """Return (the loop's core, the core of everything else); the same one on a single-core machine."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[:1]), set(cores[1:] or cores)


@contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """Pin this thread, and all threads and processes it starts, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
