"""Updating a running vLLM engine: how long it takes, and what it costs the engine.

    learner: step ─► copy ─► cast, encode ─► Redis ─► worker: fetch, patch ─► pause ─► load ─► resume: it serves
    interleaved with:      vLLM's own reload of the same tensors from its memory: the reference for both bars
                           step ─► safetensors file ─► pause ─► vLLM's own reload of it ─► resume: the usual way

A real engine on a CPU, with 136M parameters in bf16 and always _NUM_IN_FLIGHT samples in flight, at some ten steps per
second, so the cost of a load shows within a second. The engine computes in one thread; learner, worker and Redis share
the other core, and also the engine's while the learner encodes during its next step. Time counts from the end of the
learner's step, so it includes copy and cast. The cost of an update is the tokens missing from the second that starts
with the pause, compared to a second without an update.

The usual way's file goes to the local disk's page cache, not over a network. On a CPU vLLM's own reload leaves a tied
head with the old embedding (see `vllm.loading.transfer`), which saves it work. It packs layers in vLLM's own layout;
after it all weights are loaded again, unmeasured, in our writable layout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import transformers

from bench.learner_side import LearnerSide
from bench.measure import Say, environment_as_it_was
from bench.publishing import RUN_UID
from bench.report import Bar, Fact, Line
from bench.serving_engine import GROUP_SIZE, MAX_TOKENS, PROMPT_TOKENS, WatchedEngine, keep_busy
from bench.training import make_model
from bench.worker_model import make_tokenizer
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.learner.process.background import BackgroundThread
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.tasks import cancel_all
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import EngineSettings, KvCache
from streamrl.workers.engines.model import read_model
from streamrl.workers.weights.follower import Patience, WeightFollower

_NUM_IN_FLIGHT = 2 * GROUP_SIZE
_STEP_TOKENS = 32
_WARM_UP_S = 4.0
_SECOND_S = 1.0
_LAST_STEP_S = 0.2  # until its tokens have arrived
_TIMEOUT_S = 60.0
_KV_CACHES: tuple[KvCache, ...] = get_args(KvCache)


def _middling() -> transformers.PreTrainedModel:
    return make_model(quick=False)


def bench_serving(
    *,
    shared: Path,
    num_rounds: int,
    say: Say,
    make: Callable[[], transformers.PreTrainedModel] = _middling,
) -> list[Line]:
    """`shared`: a memory-backed folder for the mirror."""
    with scratch_folder() as folder, environment_as_it_was():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        return asyncio.run(_measure(folder, shared, num_rounds=num_rounds, say=say, make=make))


async def _measure(
    folder: Path, shared: Path, *, num_rounds: int, say: Say, make: Callable[[], transformers.PreTrainedModel]
) -> list[Line]:
    rounds: list[Round] = []
    async with _opened(folder, shared, say=say, make=make) as scene:
        for number in range(num_rounds):
            rounds.append(await scene.round(folder / "checkpoint.safetensors"))
            say(f"round {number + 1} of {num_rounds}: {rounds[-1]}")
    return lines_of(rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    served_after_s: float  # since the end of the learner's step
    paused_s: float
    lost: float  # tokens, in the second that starts with the pause
    calm: float  # tokens in a second without an update
    num_bytes: int  # sent by the learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    ours: Mapping[KvCache, Update]
    own_s: Mapping[KvCache, float]  # vLLM's own reload, by preceding cache mode
    checkpoint: Update

    def __str__(self) -> str:
        updates = [
            f"{kv_cache}: served after {one.served_after_s:.3f} s, paused {one.paused_s:.3f} s, "
            f"lost {one.lost:.0f} of {one.calm:.0f} tokens, own reload {self.own_s[kv_cache]:.3f} s"
            for kv_cache, one in self.ours.items()
        ]
        return "; ".join([*updates, f"checkpoint: after {self.checkpoint.served_after_s:.3f} s"])


def lines_of(rounds: Sequence[Round]) -> list[Line]:
    updates = [(one, each.own_s[kv_cache]) for each in rounds for kv_cache, one in each.ours.items()]
    checkpoints = [each.checkpoint for each in rounds]
    return [
        Bar(
            name="publish to serving / own reload",
            value=median(one.served_after_s / own_s for one, own_s in updates),
            unit="x",
            goal=1.0,
            better="lower",
        ),
        Bar(
            name="generation paused / own reload",
            value=median(one.paused_s / own_s for one, own_s in updates),
            unit="x",
            goal=0.2,
            better="lower",
        ),
        Fact(name="vLLM's own reload from memory", value=median(own_s for _, own_s in updates), unit="s"),
        Fact(name="publish to serving", value=median(one.served_after_s for one, _ in updates), unit="s"),
        Fact(name="generation paused", value=median(one.paused_s for one, _ in updates), unit="s"),
        Fact(name="bytes of a version", value=median(one.num_bytes for one, _ in updates) / 1e6, unit="MB"),
        Fact(name="tokens made without updates", value=median(one.calm for one, _ in updates), unit="tokens/s"),
        *(
            Fact(
                name=f"lost in the second after an update, {kv_cache}",
                value=median(each.ours[kv_cache].lost for each in rounds),
                unit="tokens/s",
            )
            for kv_cache in _KV_CACHES
        ),
        Fact(name="whole checkpoint: publish to serving", value=_median(checkpoints, "served_after_s"), unit="s"),
        Fact(name="whole checkpoint: generation paused", value=_median(checkpoints, "paused_s"), unit="s"),
        Fact(name="whole checkpoint: lost in the second after", value=_median(checkpoints, "lost"), unit="tokens/s"),
        Fact(name="whole checkpoint: bytes", value=_median(checkpoints, "num_bytes") / 1e6, unit="MB"),
    ]


def _median(updates: Sequence[Update], name: str) -> float:
    return median(getattr(update, name) for update in updates)


class _Scene:
    """A learner, and a worker's busy engine that follows its versions."""

    def __init__(self, engine: WatchedEngine, learner: LearnerSide, follower: WeightFollower, mirror: Path) -> None:
        self._engine, self._learner, self._follower, self._mirror = engine, learner, follower, mirror

    async def round(self, checkpoint: Path) -> Round:
        ours: dict[KvCache, Update] = {}
        own_s: dict[KvCache, float] = {}
        for kv_cache in _KV_CACHES:
            ours[kv_cache] = await self._version(kv_cache)
            own_s[kv_cache] = await self._engine.measure_own_reload(self._mirror)
        from_checkpoint = await self._checkpoint(checkpoint)
        await self._engine.restore()
        return Round(ours=ours, own_s=own_s, checkpoint=from_checkpoint)

    async def _version(self, kv_cache: KvCache) -> Update:
        self._engine.kv_cache = kv_cache

        async def publish() -> tuple[int, float]:
            publishing = asyncio.create_task(asyncio.to_thread(self._learner.publish), name="publish")
            async with asyncio.timeout(_TIMEOUT_S):
                await self._follower.serving(self._follower.version + 1)
            served_at = time.perf_counter()
            return (await publishing).num_bytes, served_at  # publishing may still be writing an anchor beside the delta

        return await self._update(publish)

    async def _checkpoint(self, path: Path) -> Update:
        async def publish() -> tuple[int, float]:
            num_bytes = await asyncio.to_thread(self._learner.save, path)
            await self._engine.reload_file(path)
            return num_bytes, time.perf_counter()

        return await self._update(publish)

    async def _update(self, publish: Callable[[], Awaitable[tuple[int, float]]]) -> Update:
        """Train a step and measure its update; `publish` returns the bytes, and when they were served."""
        await asyncio.to_thread(self._learner.train)
        await asyncio.sleep(_SECOND_S)
        began = time.perf_counter()
        calm = self._engine.num_made(began - _SECOND_S, began)
        num_bytes, served_at = await publish()
        loaded = self._engine.load_began
        await asyncio.sleep(max(0.0, loaded + _SECOND_S + _LAST_STEP_S - time.perf_counter()))
        return Update(
            served_after_s=served_at - began,
            paused_s=self._engine.paused_s,
            lost=calm - self._engine.num_made(loaded, loaded + _SECOND_S),
            calm=calm,
            num_bytes=num_bytes,
        )


@contextlib.asynccontextmanager
async def _opened(
    folder: Path, shared: Path, *, say: Say, make: Callable[[], transformers.PreTrainedModel]
) -> AsyncIterator[_Scene]:
    model = make()
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    vocabulary = model.config.vocab_size
    del model
    facts = read_model(str(folder / "model"), trust_remote_code=False)
    config, keys = _config(folder / "model"), Keys("bench")
    engine = WatchedEngine(EngineSettings(model=facts, config=config, seed=1))
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis.start(folder / "redis"))
        client = stack.enter_context(connect(server.url, config.redis))
        store = RedisStore(client, keys)
        announcer = LearnerStream(client, keys, run_uid=RUN_UID, term=1, holder="bench", lease_s=600.0)
        announcer.claim(config_json=config.model_dump_json(), fingerprint=facts.fingerprint, wait_s=0.0)
        announcer.restore(cursor=START)
        background = BackgroundThread("publisher")
        stack.enter_context(background.working(join_s=_TIMEOUT_S))
        learner = LearnerSide(config, store=store, announcer=announcer, background=background, num_tokens=_STEP_TOKENS)
        worker = await stack.enter_async_context(connect_async(server.url, config.redis))
        mirror = Mirror(shared / "mirror", run_uid=RUN_UID)
        follower = WeightFollower(
            announcements=WorkerStream(worker, keys, worker="0", lease_s=60.0).announcements,
            reading=lambda path: store,
            mirror=mirror,
            prover=None,
            progress=Progress(part="worker/0", role="worker"),
            patience=Patience(give_up_after_s=_TIMEOUT_S, first_version_s=_TIMEOUT_S),
        )
        stack.callback(follower.close)
        say("starting vLLM with the 136M parameters in bf16")
        stack.push_async_callback(engine.stop)
        await engine.start()
        engine.watch()
        following = asyncio.create_task(follower.follow(engine), name="follow")
        stack.push_async_callback(cancel_all, [following])
        await asyncio.to_thread(learner.publish)
        async with asyncio.timeout(_TIMEOUT_S):
            await follower.proved(1)
        busy = keep_busy(engine, num_in_flight=_NUM_IN_FLIGHT, vocabulary=vocabulary)
        stack.push_async_callback(cancel_all, [asyncio.create_task(busy, name="samples")])
        scene = _Scene(engine, learner, follower, mirror.path)
        await asyncio.sleep(_WARM_UP_S)
        await scene.round(folder / "checkpoint.safetensors")  # warms up code and memory
        yield scene


def _config(model: Path) -> schema.Config:
    return schema.Config(
        name="bench",
        model=schema.Model(path=str(model), dtype="float32"),
        data=schema.Data(train="unused.jsonl", max_prompt_tokens=PROMPT_TOKENS),
        sampling=schema.Sampling(num_samples=GROUP_SIZE, max_tokens=MAX_TOKENS),
        rewards={"unused": schema.FunctionReward(type="function", target="unused")},
        worker=schema.Worker(
            threads=1,
            max_groups_in_flight=_NUM_IN_FLIGHT // GROUP_SIZE,
            engine_args={"worker_extension_cls": "bench.own_reload.OwnReload", "kv_cache_memory_bytes": 512 << 20},
        ),
    )
