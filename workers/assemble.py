"""Assembles a worker's parts for a run, in an order that reports a user's mistake before an engine starts.

rewards ─► model ─► further hosts, mirror of the weights ─► environment, teacher ─► rollout ─► supervisor
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import TYPE_CHECKING

from streamrl.config.logged import needed_for
from streamrl.errors import RunGone
from streamrl.process import parse_address
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.rejected import spread_s
from streamrl.workers.engines.base import Engine, EngineSettings, make_engine
from streamrl.workers.engines.model import ModelFacts, find_model
from streamrl.workers.environments.playing import playing
from streamrl.workers.follow_run import RunSettings
from streamrl.workers.health import Health, WorkingParts
from streamrl.workers.hosts.first import Hosts, open_hosts
from streamrl.workers.proofs.proving import prover_of
from streamrl.workers.rewards.build import build_rewards
from streamrl.workers.rewards.teaching import Teaches
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.loop import Rollout
from streamrl.workers.supervise import RestartPatience, Supervisor
from streamrl.workers.weights.follower import Patience, WeightFollower
from streamrl.workers.weights.mirrored import open_mirror

if TYPE_CHECKING:
    from streamrl.workers.main import Options


class Assembly:
    """Assembles a worker whose run is known."""

    def __init__(
        self,
        options: Options,
        keys: Keys,
        settings: RunSettings,
        info: RunInfo,
        health: Health,
        engines: Iterator[int],  # numbers its engines
    ) -> None:
        self._options = options
        self._keys = keys
        self._settings = settings
        self._config = settings.config
        self._info = info
        self._health = health
        self._progress = health.progress
        self._engines = engines

    @contextlib.asynccontextmanager
    async def supervisor(self, stream: WorkerStream) -> AsyncIterator[Supervisor]:
        """Yield the worker, ready to run; its parts are closed afterwards."""
        options, config = self._options, self._config
        self._health.parts = None  # those of earlier settings have ended
        rewards = build_rewards(
            config.rewards, options.permissions, options.local_reward_url, stream.spend, needed_for(config)
        )
        model = await find_model(
            config, self._info, override=options.model, permissions=options.permissions, progress=self._progress
        )
        async with contextlib.AsyncExitStack() as ending:
            hosts = await ending.enter_async_context(self._hosts(stream))
            weights = await ending.enter_async_context(self._following(stream, model, hosts))
            ending.push_async_callback(rewards.close)
            await rewards.start()
            at = parse_address(options.sessions, what="--sessions")
            player = await ending.enter_async_context(playing(config, options.permissions, model, at))
            teacher = self._teacher(model)
            if teacher is not None:
                ending.push_async_callback(teacher.close)
            answerer = Answerer(
                teacher=teacher,
                rewards=rewards,
                config=config,
                worker=options.worker,
                fingerprint=model.fingerprint,
                player=player,
                ends=model.ends(),
            )
            rollout = Rollout(
                tickets=stream,
                weights=weights,
                answerer=answerer,
                config=config,
                has_other_settings=self._settings.differ_in,
                progress=self._progress,
            )
            self._health.parts = WorkingParts(
                work=rollout, weights=weights, rewards=rewards, stall_s=config.worker.stall_s
            )
            yield Supervisor(
                rollout=rollout,
                weights=weights,
                make_engine=partial(self._engine, model, hosts),
                progress=self._progress,
                patience=RestartPatience(
                    rejected_s=config.weights.give_up_after_s, spread_s=spread_s(config.weights.give_up_after_s)
                ),
                after_term=None if options.gpu_memory is None else self._info.term,
            )

    def _teacher(self, model: ModelFacts) -> Teaches | None:
        settings = self._config.teacher
        if settings is None or not settings.urls:
            return None
        from streamrl.workers.rewards.teacher import build_teacher  # imports httpx

        config = self._config
        longest = config.data.max_prompt_tokens + config.max_response_tokens
        permissions = self._options.permissions
        return build_teacher(settings, permissions, model.tokenizer, model=model.path, longest=longest)

    @contextlib.asynccontextmanager
    async def _hosts(self, stream: WorkerStream) -> AsyncIterator[Hosts | None]:
        """Yield the further hosts of this worker's engine, if any."""
        worker = self._config.worker
        if worker.hosts == 1:
            yield None
            return
        secret = await stream.secret()
        if secret is None:
            raise RunGone(f"run {self._info.name!r} is no longer in Redis")
        hosts = Hosts(
            num=worker.hosts,
            secret=secret,
            run_uid=self._info.uid,
            progress=self._progress,
            start_timeout_s=worker.start_timeout_s,
        )
        async with open_hosts(hosts, parse_address(self._options.hosts, what="--hosts")):
            yield hosts

    @contextlib.asynccontextmanager
    async def _following(
        self, stream: WorkerStream, model: ModelFacts, hosts: Hosts | None
    ) -> AsyncIterator[WeightFollower]:
        config = self._config
        prover = None
        if config.weights.prove:  # in a thread, since it imports torch
            prover = await asyncio.to_thread(prover_of, config, model, self._progress)
        async with open_mirror(
            config,
            model,
            self._keys,
            run_uid=self._info.uid,
            worker=self._options.worker,
            redis_url=self._options.redis_url,
            peers=self._options.peers,
            progress=self._progress,
        ) as mirrored:
            weights = WeightFollower(
                announcements=stream.announcements,
                reading=mirrored.reading,
                mirror=mirrored.mirror,
                prover=prover,
                progress=self._progress,
                patience=Patience(
                    give_up_after_s=config.weights.give_up_after_s, first_version_s=config.learner.idle_timeout_s
                ),
                kv_cache=config.weights.kv_cache,
                further=hosts,
            )
            with contextlib.closing(weights):
                yield weights

    def _engine(self, model: ModelFacts, hosts: Hosts | None) -> Engine:
        seed = _engine_seed(self._config.seed, self._options.worker, next(self._engines))
        memory = self._options.gpu_memory
        return make_engine(EngineSettings(model=model, config=self._config, seed=seed, gpu_memory=memory, hosts=hosts))


def _engine_seed(run_seed: int, worker: str, engine: int) -> int:
    """Return a seed unique to each worker and each of its engines, so that no two generate the same samples."""
    digest = hashlib.sha256(f"{run_seed}/{worker}/{engine}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
