"""A worker's full path against vLLM itself: tokens per second from tickets to delivered groups, over bare AsyncLLM.

    tickets ─► Redis ─► rollout ─► vLLM ─► a reward function, in its child process ─► group ─► Redis
    prompts ──────────────────────► the same vLLM, all requests at once, outputs discarded

One AsyncLLM serves both, in turns, with the same prompts, sampling and slots. With updates, a new version is announced
every two seconds (encoded beforehand, since that is the learner's work), fetched from Redis, patched, loaded and
proved. Blocks on vLLM's start, once per model.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import redis

from bench.measure import Say, environment_as_it_was
from bench.publishing import RUN_UID, Publishing
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.permissions import Permissions
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START, Announcement
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import BlobStore, open_store
from streamrl.protocol.wire.ticket import Ticket
from streamrl.tasks import cancel_all, run_beside
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import ModelFacts, read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.engines.vllm.requests import sampling_params
from streamrl.workers.proofs.proving import Prover
from streamrl.workers.rewards.build import build_rewards
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.loop import Rollout
from streamrl.workers.weights.follower import Patience, WeightFollower
from streamrl.workers.weights.roles import AnnouncementsDouble

if TYPE_CHECKING:
    from bench.worker_model import Size

_NUM_SAMPLES = 8
_GROUPS_IN_FLIGHT = 16
_PROMPT_TOKENS = 16
_UPDATE_EVERY_S = 2.0
_SPARE = 3  # times as many updates are prepared as a round without any would have time for
_DELIVERY_TIMEOUT_S = 300.0
_REWARD_OPTIONS: dict[str, str | int | float | bool] = {"free_tokens": 64, "max_tokens": 512}


def bench(*, quick: bool, say: Say) -> list[Line]:
    from bench.worker_model import MIDDLE, SMALL  # imports torch

    with scratch_folder() as folder, environment_as_it_was():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        num_rounds, share = (1, 1) if quick else (5, 4)
        middle = asyncio.run(_measure(MIDDLE, folder / "25M", num_groups=16 * share, num_rounds=num_rounds, say=say))
        small = asyncio.run(_measure(SMALL, folder / "0.7M", num_groups=64 * share, num_rounds=num_rounds, say=say))
    return [
        Bar(name="25M: worker / bare vLLM", value=middle["worker"], unit="x", goal=0.93, better="higher"),
        Bar(name="25M: with an update every 2 s", value=middle["updated"], unit="x", goal=0.85, better="higher"),
        Bar(name="0.7M: worker / bare vLLM", value=small["worker"], unit="x", goal=0.75, better="higher"),
        Fact(name="0.7M: with an update every 2 s", value=small["updated"], unit="x"),
        Fact(name="25M: bare vLLM", value=middle["bare_tokens_per_s"], unit="tokens/s"),
        Fact(name="0.7M: bare vLLM", value=small["bare_tokens_per_s"], unit="tokens/s"),
    ]


async def _measure(size: Size, folder: Path, *, num_groups: int, num_rounds: int, say: Say) -> dict[str, float]:
    from bench.worker_model import write_model

    num_parameters = write_model(folder / "model", size)
    say(f"{size.name}: starting vLLM with {num_parameters / 1e6:.2f} million parameters")
    async with _opened(folder) as scene:
        await scene.bare(num_groups // 4)  # warms up connections and code
        await scene.worker(num_groups // 4)
        rounds: list[dict[str, float]] = []
        for number in range(num_rounds):
            speeds = {"bare": await scene.bare(num_groups), "worker": await scene.worker(num_groups)}
            await scene.prepare_updates()
            announcing = {"announce versions": scene.versions.announce_all()}
            speeds["updated"] = await run_beside(scene.worker(num_groups), announcing)
            rounds.append(speeds)
            say(f"{size.name}, round {number + 1}: " + ", ".join(f"{n} {v:,.0f} tokens/s" for n, v in speeds.items()))
    ratios = {name: median(r[name] / r["bare"] for r in rounds) for name in ("worker", "updated")}
    return {**ratios, "bare_tokens_per_s": median(r["bare"] for r in rounds)}


@contextlib.asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[_Scene]:
    facts = read_model(str(folder / "model"), trust_remote_code=False)
    config, keys = _config(folder / "model"), Keys("bench")
    engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis.start(folder / "redis"))
        client = stack.enter_context(connect(server.url, config.redis))
        store = open_store("redis:", client, keys)
        stream = WorkerStream(
            await stack.enter_async_context(connect_async(server.url, config.redis)), keys, worker="0", lease_s=60.0
        )
        learner = LearnerStream(client, keys, run_uid=RUN_UID, term=1, holder="bench", lease_s=600.0)
        learner.claim(config_json=config.model_dump_json(), fingerprint=facts.fingerprint, wait_s=0.0)
        learner.restore(cursor=START)
        versions = Versions(folder / "model", store)
        weights = _follower(versions, store, folder, facts)
        stack.callback(weights.close)
        rewards = build_rewards(config.rewards, Permissions(), None)
        await rewards.start()
        stack.push_async_callback(rewards.close)
        stack.push_async_callback(engine.stop)
        await engine.start()
        rollout = Rollout(
            tickets=stream,
            weights=weights,
            answerer=Answerer(rewards=rewards, config=config, worker="0", fingerprint=facts.fingerprint),
            config=config,
            has_other_settings=lambda info: False,
            progress=Progress(part="worker/0", role="worker"),
        )
        working = asyncio.create_task(rollout.run(engine, asyncio.Event()), name="rollout")
        stack.push_async_callback(cancel_all, [working])
        async with asyncio.timeout(_DELIVERY_TIMEOUT_S):
            await weights.proved(1)
        yield _Scene(engine, facts, config.sampling, learner, client, keys, versions)


def _follower(versions: Versions, store: BlobStore, folder: Path, facts: ModelFacts) -> WeightFollower:
    progress = Progress(part="worker/0", role="worker")
    return WeightFollower(
        announcements=versions.announcements,
        reading=lambda path: store,
        mirror=Mirror(folder / "mirror", run_uid=RUN_UID),
        prover=Prover(model=facts, dtype="float32", progress=progress),
        progress=progress,
        patience=Patience(give_up_after_s=60.0, first_version_s=60.0),
    )


def _config(model: Path) -> schema.Config:
    return schema.Config(
        model=schema.Model(path=str(model)),
        data=schema.Data(train="", max_prompt_tokens=_PROMPT_TOKENS),
        sampling=schema.Sampling(num_samples=_NUM_SAMPLES, max_tokens=512),
        rewards={"length": schema.FunctionReward(type="function", target="length_penalty", options=_REWARD_OPTIONS)},
        weights=schema.Weights(dtype="float32"),
        worker=schema.Worker(threads=1, max_groups_in_flight=_GROUPS_IN_FLIGHT),
    )


class Versions:
    """An announced anchor, and deltas that are already stored and get announced one by one."""

    def __init__(self, model: Path, store: BlobStore) -> None:
        from bench.worker_model import after_a_step, read_state  # imports torch

        tensors, self._state = read_state(model)
        self._publishing = Publishing(tensors, store)
        self._after_a_step = after_a_step
        self.announcements = AnnouncementsDouble()
        self._coming = [self._publishing.publish(self._state, anchor=True)]
        self.announce_next()

    def prepare(self, count: int) -> None:
        """Store updates until there are as many to announce."""
        while len(self._coming) < count:
            self._state = self._after_a_step(self._state, len(self._publishing.manifests))
            self._coming.append(self._publishing.publish(self._state))

    async def announce_all(self, *, every_s: float = _UPDATE_EVERY_S) -> None:
        while True:
            self.announce_next()
            await asyncio.sleep(every_s)

    def announce_next(self) -> None:
        assert self._coming, f"the round took more than {_SPARE} times as long as the one without updates"
        manifest = self._coming.pop(0)
        self.announcements.announce(
            Announcement(
                version=manifest.version, base=manifest.base, step=manifest.step, manifest=encode_manifest(manifest)
            )
        )


class _Scene:
    """A worker on a run in Redis, with access to its engine."""

    def __init__(
        self,
        engine: VllmEngine,
        model: ModelFacts,
        sampling: schema.Sampling,
        learner: LearnerStream,
        client: redis.Redis,
        keys: Keys,
        versions: Versions,
    ) -> None:
        self._engine, self._model, self._sampling = engine, model, sampling
        self._learner, self._client, self._groups = learner, client, keys.groups("train")
        self.versions = versions
        self._num_tickets = 0
        self._num_requests = self._num_issued = 0
        self._took_s = 0.0  # the last round of the worker

    async def bare(self, num_groups: int) -> float:
        """Return tokens per second of vLLM alone."""
        llm, params = self._engine.bare(), sampling_params(self._sampling, self._model)
        prompts = [ticket.token_ids.tolist() for ticket in self._tickets(num_groups) for _ in range(_NUM_SAMPLES)]

        async def one(prompt: list[int]) -> int:
            self._num_requests += 1
            outputs = llm.generate({"prompt_token_ids": prompt}, params, f"bare-{self._num_requests}")
            return sum([len(output.outputs[0].token_ids) async for output in outputs])

        began = time.perf_counter()
        num_tokens = sum(await asyncio.gather(*map(one, prompts)))
        return num_tokens / (time.perf_counter() - began)

    async def worker(self, num_groups: int) -> float:
        """Return tokens per second, from issuing the first ticket to delivering the last group."""
        tickets = self._tickets(num_groups)
        tokens_before = self._engine.stats().num_made
        began = time.perf_counter()
        self._learner.issue(tickets)
        self._num_issued += num_groups
        await asyncio.to_thread(self._await_groups)
        self._took_s = time.perf_counter() - began
        return (self._engine.stats().num_made - tokens_before) / self._took_s

    def _await_groups(self) -> None:
        """Wait for the groups by counting them: reading them is the learner's work."""
        deadline = time.monotonic() + _DELIVERY_TIMEOUT_S
        while self._client.xlen(self._groups) < self._num_issued:
            assert time.monotonic() < deadline, "the worker did not deliver"
            time.sleep(0.01)

    async def prepare_updates(self) -> None:
        """Prepare more updates than a round like the last can need."""
        count = 1 + math.ceil(_SPARE * self._took_s / _UPDATE_EVERY_S)
        await asyncio.to_thread(self.versions.prepare, count)

    def _tickets(self, count: int) -> list[Ticket]:
        rng = np.random.default_rng(self._num_tickets)
        first, self._num_tickets = self._num_tickets, self._num_tickets + count
        return [
            Ticket(
                number=number,
                run_uid=RUN_UID,
                purpose="train",
                data_epoch=0,
                prompt_index=number,
                prompt="",
                token_ids=rng.integers(2, 64, size=_PROMPT_TOKENS, dtype=np.int32),
                num_samples=_NUM_SAMPLES,
            )
            for number in range(first, first + count)
        ]
