"""A worker's world in memory: tickets, an engine without a model, weights that load at once, rewards by a function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from streamrl.config import schema
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.wire.group import Group, decode_body, decode_header
from streamrl.protocol.wire.ticket import Ticket
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version
from streamrl.workers.engines.base import SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.environments.playing import Plays
from streamrl.workers.follow_run import RunSettings
from streamrl.workers.rewards.base import GroupReward, Reward, RewardDouble, ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rewards.teaching import Teaches
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.loop import Rollout
from streamrl.workers.rollout.roles import TicketsDouble
from streamrl.workers.weights.roles import Weights, WeightsDouble
from tests.helpers import make_ticket, wait_until_async

FIRST_VERSION = make_version(1, 0)


def worker_config(**worker: Any) -> schema.Config:
    return schema.Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "prompts.jsonl", "max_prompt_tokens": 32},
            "sampling": {"num_samples": 4, "max_tokens": 16},
            "rewards": {"made_up": {"type": "function", "target": "exact_match"}},
            "worker": {"grace_s": 0.2, **worker},
        }
    )


def a_sample_request(**sampling: Any) -> SampleRequest:
    return SampleRequest(
        request_id="sample", prompt_ids=np.arange(3, dtype=np.int32), sampling=schema.Sampling(**sampling)
    )


def a_score_item() -> ScoreItem:
    return ScoreItem(prompt="", completion="", token_ids=np.empty(0, dtype=np.int32))


class WorkerWorld:
    """One worker; `start` runs its loop, `finish` ends it."""

    def __init__(
        self,
        *,
        engine: EngineDouble | None = None,
        judge: Callable[[ScoreItem], float] | None = None,
        source: Reward | GroupReward | None = None,
        player: Plays | None = None,
        teacher: Teaches | None = None,
        weights: Weights | None = None,
        **worker: Any,
    ) -> None:
        config = worker_config(**worker)
        self.info = RunInfo(
            uid="uid",
            name="run",
            term=1,
            config_json=config.model_dump_json(),
            fingerprint="model",
            state="running",
        )
        self.tickets = TicketsDouble(self.info)
        self.engine = engine or EngineDouble()
        self.weights = WeightsDouble(version=FIRST_VERSION)
        self.reward = RewardDouble(judge or (lambda item: float(len(item.token_ids))))
        self.progress = Progress(part="worker/0", role="worker")
        self.rollout = Rollout(
            tickets=self.tickets,
            weights=weights or self.weights,
            answerer=Answerer(
                rewards=Rewards({"made_up": Weighted(reward=source or self.reward, weight=2.0)}),
                config=config,
                worker="0",
                fingerprint="model",
                player=player,
                teacher=teacher,
            ),
            config=config,
            has_other_settings=RunSettings(self.info).differ_in,
            progress=self.progress,
        )
        self.stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def put(self, number: int, **changes: Any) -> Ticket:
        ticket = make_ticket(number, **changes)
        self.tickets.waiting.append(ticket)
        return ticket

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self.rollout.run(self.engine, self.stop), name="rollout")
        return self._task

    async def finish(self) -> None:
        self.stop.set()
        assert self._task is not None
        await self._task

    async def delivered(self, count: int) -> list[Group]:
        """Return the first groups, once so many are delivered."""
        await self.until(lambda: len(self.tickets.delivered) >= count, f"{count} groups delivered")
        return [decode_body(decode_header(header), body) for _, header, body in self.tickets.delivered[:count]]

    async def until(self, predicate: Callable[[], Any], description: str) -> Any:
        async def ask() -> Any:
            if self._task is not None and self._task.done():
                self._task.result()
            return predicate()

        asked: Callable[[], Awaitable[Any]] = ask
        return await wait_until_async(asked, description=description)
