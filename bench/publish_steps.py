"""What publishing costs the learner: its steps with a version published after each, and without.

    step ─► step ─► ...                                     without
    step ─► canary, copy ─► step ─► canary, copy ─► ...     with: encode, store and announce are beside, on another core

The step is a real one of AdamW on 512 tokens, which is little: the more a step does, the smaller the share of what the
loop waits for. One core computes; the other one publishes, and runs Redis.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.measure import Rounds, Say, seconds
from bench.report import Bar, Fact, Line
from bench.training import make_model, train_once
from learner.companion import Beside
from learner.distributed import World
from learner.model import Policy, load_policy
from learner.publish import Publisher
from streamrl.config import schema
from streamrl.transport.connection import connect
from streamrl.transport.embedded import EmbeddedRedis
from streamrl.transport.keys import Keys
from streamrl.transport.types import Announcement
from streamrl.weights.redis_store import RedisStore

_LR = 1e-6
_NUM_TOKENS = 512
_CANARY_TOKENS = 16


class _Announced:
    def announce(self, announcement: Announcement, *, keep: list[int]) -> None:
        """Nobody listens."""


class _Stepping:
    def __init__(self, policy: Policy, publisher: Publisher) -> None:
        self._policy, self._publisher = policy, publisher
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=_LR, betas=(0.9, 0.98), weight_decay=0.1)
        self._step = 0
        self.blocked_s: list[float] = []

    def without(self) -> float:
        return seconds(self._train)

    def publishing(self) -> float:
        """From a step's end to the next one's, with what is published meanwhile."""
        return seconds(self._train_and_publish)

    def warm_up(self) -> None:
        """The anchor, and memory that is used for the first time."""
        self._train()
        self._publisher.publish(0)
        self._train_and_publish()

    def _train(self) -> None:
        train_once(self._policy.model, self._optimizer, num_tokens=_NUM_TOKENS)

    def _train_and_publish(self) -> None:
        began = self._step
        self._step += 1
        self.blocked_s.append(seconds(lambda: self._publisher.begin(began)))
        self._train()
        published = self._publisher.finish()
        assert published is not None, "a store on this machine takes every version"


def bench_steps(*, quick: bool, say: Say) -> list[Line]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        EmbeddedRedis.start(Path(name) / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        folder = Path(name)
        make_model(quick=quick).save_pretrained(folder / "model")
        config = schema.Config(
            name="bench",
            model=schema.Model(path=str(folder / "model"), dtype="float32"),
            data=schema.Data(train="unused.jsonl"),
            rewards={"unused": schema.FunctionReward(type="function", target="unused")},
        )
        world = World(rank=0, size=1, device=torch.device("cpu"))
        policy = load_policy(config, world, (1,))
        beside = Beside("publisher")
        publisher = Publisher(
            policy=policy,
            config=config,
            world=world,
            run_uid="bench",
            epoch=1,
            store=RedisStore(client, Keys("bench")),
            announcer=_Announced(),
            canary_ids=np.arange(3, 3 + _CANARY_TOKENS, dtype=np.int32),
            beside=beside,
        )
        with beside.working(join_s=60):
            stepping = _Stepping(policy, publisher)
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
        Fact(name="the loop waits for canary and copy", value=float(np.median(stepping.blocked_s)), unit="s"),
    ]
