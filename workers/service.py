"""A worker's lifecycle: find the run, check permissions, start the engine, work, leave.

    wait for the run ─► permissions, model, rewards ─► engines, one after the other (`workers.supervise`) ─► leave
          ▲                                                                                                    │
          └──────────────── the run goes on with other settings (`workers.follow_run`) ────────────────────────┘

Returns normally, or raises the error that ended the worker. Every wait for a dependency is bounded and ends early on a
stop request. Anything that ignores the stop, such as a hanging Redis call, holds the worker for at most its grace
period plus `_EXTRA_GRACE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import structlog

from streamrl.config import schema
from streamrl.errors import RunGone
from streamrl.extras import need
from streamrl.permissions import Permissions
from streamrl.process import parse_address
from streamrl.protocol.transport.connection import check_server, connect, connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import report_progress
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.rejected import spread_s
from streamrl.tasks import cancel_all, run_beside, unless
from streamrl.telemetry.progress import Progress, Role
from streamrl.workers.answer import Answerer
from streamrl.workers.engines.base import Engine, EngineSettings, make_engine
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.playing import playing
from streamrl.workers.follow_run import RunSettings, follow_run
from streamrl.workers.further import serve_ranks
from streamrl.workers.health import Health, Parts
from streamrl.workers.hosts.first import Hosts, open_hosts
from streamrl.workers.mirrored import open_mirror
from streamrl.workers.model import find_model
from streamrl.workers.proofs.proving import prover_of
from streamrl.workers.rewards.chats import ends_of
from streamrl.workers.rewards.mixing import build_rewards
from streamrl.workers.rewards.teaching import Teaches
from streamrl.workers.rollout import Rollout
from streamrl.workers.supervise import RestartPatience, Supervisor
from streamrl.workers.weights import Patience, WeightFollower

log = structlog.get_logger(__name__)

_FIRST_LEASE_S = 60.0  # placeholder: no lease is taken before the run's `lease_s` is known
_EXTRA_GRACE_S = 2.5  # beyond the grace period, for handing tickets back and ending the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The worker's command-line options."""

    redis_url: str
    run: str
    worker: str  # unique to this worker
    permissions: Permissions
    model: str | None = None  # overrides the run's
    join: str | None = None  # HOST:PORT of an engine's first host, to join it as a further host
    hosts: str = "0.0.0.0:9600"  # HOST:PORT where further hosts join its engine, if the run has any
    local_reward_url: str | None = None
    http: str | None = None  # HOST:PORT to serve probes and metrics on
    sessions: str = "127.0.0.1:0"  # HOST:PORT where agents call the model
    peers: str | None = None  # HOST:PORT where workers on other hosts fetch weights
    gpu_memory: float | None = None  # fraction of its GPUs' memory for its engine
    import_vllm: bool = False  # while waiting for the run


@dataclass(slots=True)
class _Grace:
    """How long a stopped worker may continue; 0 until it knows its run."""

    seconds: float = 0.0


async def serve(options: Options, stop: asyncio.Event, *, leave: Callable[[int], NoReturn]) -> None:
    """Run until stopped, or until the run has ended or was removed. `leave` ends the process at once; it is called if
    the worker does not stop in time."""
    need("a worker", "torch", "transformers", extra="worker-cpu", or_extra="worker-gpu")
    grace = _Grace()
    await run_beside(_serve(options, stop, grace), {"leave in time": _leave_in_time(stop, grace, leave)})


async def _leave_in_time(stop: asyncio.Event, grace: _Grace, leave: Callable[[int], NoReturn]) -> None:
    await stop.wait()
    await asyncio.sleep(grace.seconds + _EXTRA_GRACE_S)
    log.error(
        "stopped_without_ending",
        reason="a stop was requested, but something did not end in time; its leases will expire",
    )
    leave(1)


async def _serve(options: Options, stop: asyncio.Event, grace: _Grace) -> None:
    role: Role = "worker" if options.join is None else "host"
    progress = Progress(part=f"{role}/{options.worker}", role=role)
    keys = Keys(options.run)
    health = Health(progress)
    try:
        await asyncio.to_thread(_await_server, options.redis_url, stop)
    except _StopRequested:
        return
    async with contextlib.AsyncExitStack() as ending:
        if options.http is not None:
            from streamrl.workers.http import serving  # imports starlette and uvicorn

            at = parse_address(options.http, what="--http")
            address = await ending.enter_async_context(serving(health, at))
            log.info("answering_http", address=address)
            progress.note(http=address)
        client = await ending.enter_async_context(connect_async(options.redis_url, schema.Redis()))
        await ending.enter_async_context(report_progress(client, keys, progress))
        try:
            stream = WorkerStream(client, keys, worker=options.worker, lease_s=_FIRST_LEASE_S)
            importing = await ending.enter_async_context(_importing(options))
            engines = itertools.count(1)

            async def serve_run(info: RunInfo, settings: RunSettings) -> None:
                grace.seconds = settings.config.worker.grace_s
                if not importing.done():
                    progress.starting("import vLLM")
                    await unless(stop, importing)
                if stop.is_set():
                    return
                async with run_stream(options, keys, settings.config) as of_run:
                    if options.join is not None:
                        await serve_ranks(options, keys, settings, info, of_run, progress, stop)
                    else:
                        await _Service(options, keys, settings, info, health, engines).run(of_run, stop)

            await follow_run(stream, name=options.run, stop=stop, progress=progress, serve=serve_run)
        except RunGone:
            log.info("run_gone", run=options.run)


@contextlib.asynccontextmanager
async def run_stream(options: Options, keys: Keys, config: schema.Config) -> AsyncIterator[WorkerStream]:
    """The stream of a run that was found, with its timeouts."""
    async with connect_async(options.redis_url, config.redis) as client:
        yield WorkerStream(
            client,
            keys,
            worker=options.worker,
            lease_s=config.worker.lease_s,
            give_up_after_s=config.redis.give_up_after_s,
        )


@contextlib.asynccontextmanager
async def _importing(options: Options) -> AsyncIterator[asyncio.Task[None]]:
    """Import vLLM in a task. Nothing else may import the same packages meanwhile: two threads can each see a partially
    initialised module."""
    if options.import_vllm:
        from streamrl.workers.engines.vllm_start import import_front_end

        importing = import_front_end()
    else:
        importing = asyncio.sleep(0)
    task = asyncio.create_task(importing, name="import vLLM")
    try:
        yield task
    finally:
        await cancel_all([task])


class _StopRequested(Exception):
    pass


def _await_server(url: str, stop: asyncio.Event) -> None:
    """Wait for Redis, which may be down or start after its workers. Exiting with code 2, which no supervisor restarts,
    would be wrong."""
    num_failures = 0

    def note(why: str) -> None:
        nonlocal num_failures
        if stop.is_set():
            raise _StopRequested
        if num_failures == 0:
            log.warning("waiting_for_redis", why=why)
        num_failures += 1

    settings = schema.Redis()
    with connect(url, settings, patience_s=settings.give_up_after_s, on_trouble=note) as client:
        check_server(client, give_up_after_s=settings.give_up_after_s)


class _Service:
    """A worker whose run is known."""

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

    async def run(self, stream: WorkerStream, stop: asyncio.Event) -> None:
        options, config = self._options, self._config
        self._health.parts = None  # those of earlier settings have ended
        rewards = build_rewards(config.rewards, options.permissions, options.local_reward_url, stream.spend)
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
                ends=ends_of(model.tokenizer, model.stop_ids),
            )
            rollout = Rollout(
                tickets=stream,
                weights=weights,
                answerer=answerer,
                config=config,
                has_other_settings=self._settings.differ_in,
                progress=self._progress,
            )
            self._health.parts = Parts(work=rollout, weights=weights, rewards=rewards, stall_s=config.worker.stall_s)
            supervisor = Supervisor(
                rollout=rollout,
                weights=weights,
                make_engine=partial(self._engine, model, hosts),
                progress=self._progress,
                patience=RestartPatience(
                    rejected_s=config.weights.give_up_after_s, spread_s=spread_s(config.weights.give_up_after_s)
                ),
                after_term=None if options.gpu_memory is None else self._info.term,
            )
            await supervisor.run(stop)
            await stream.leave()

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
