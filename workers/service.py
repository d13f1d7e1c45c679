"""A worker's life: find the run, check what it may use, start the engine, work, leave.

    wait for the run ─► permissions, model, rewards ─► engines, one after the other (`workers.supervise`) ─► leave

Ends with 0 by returning, else by the error that ended it. What must be there is waited for with a bound; a word to stop
is heard in every one of these waits, and what does not hear it, such as a call to a Redis that hangs, does not hold the
worker for longer than its grace and `_LAST_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import redis.asyncio
import structlog

from streamrl.config import schema
from streamrl.config.load import config_from_json
from streamrl.errors import ConfigError, RunGone
from streamrl.extras import need
from streamrl.held_folders import mirror_folder, scratch_folder
from streamrl.permissions import Permissions, allowed_model
from streamrl.process import parse_address
from streamrl.protocol.transport.connection import check_server, connect, connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import report_progress
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.rejected import spread_s
from streamrl.protocol.weights.stores import open_store
from streamrl.tasks import cancel_all, run_beside, unless
from streamrl.telemetry.progress import Progress
from streamrl.workers.answer import Answerer
from streamrl.workers.await_run import await_run
from streamrl.workers.engines.base import Engine, EngineSettings, make_engine
from streamrl.workers.engines.model import ModelFacts, read_model
from streamrl.workers.environments.playing import playing
from streamrl.workers.health import Health, Parts
from streamrl.workers.pretrained import PretrainedModel
from streamrl.workers.proofs.proving import prover_of
from streamrl.workers.rewards.mixing import build_rewards
from streamrl.workers.rewards.teaching import Teaches
from streamrl.workers.rollout import Rollout
from streamrl.workers.sharing.opening import open_sharing
from streamrl.workers.supervise import RestartPatience, Supervisor
from streamrl.workers.weights import Patience, WeightFollower

log = structlog.get_logger(__name__)

_FIRST_LEASE_S = 60.0  # none is taken before the run has said how long they are
_LAST_S = 2.5  # beyond the grace, for handing tickets back and ending the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The worker's command line."""

    redis_url: str
    run: str
    worker: str  # this worker's alone
    permissions: Permissions
    model: str | None = None  # instead of the run's
    local_reward_url: str | None = None
    http: str | None = None  # HOST:PORT to answer probes and metrics on
    sessions: str = "127.0.0.1:0"  # HOST:PORT that agents ask the model at
    peers: str | None = None  # HOST:PORT that workers of other hosts ask for weights at
    gpu_memory: float | None = None  # share of its GPUs' memory that its engine may take
    import_vllm: bool = False  # while the run is waited for


@dataclass(slots=True)
class _Grace:
    """How long a worker that is told to stop may go on: not at all, before it knows its run."""

    seconds: float = 0.0


async def serve(options: Options, stop: asyncio.Event, *, leave: Callable[[int], NoReturn]) -> None:
    """Returns when told to stop, or when the run has ended or was removed. `leave` ends the process at once: where the
    word to stop was not followed in time."""
    need("a worker", "torch", "transformers", extra="worker-cpu", or_extra="worker-gpu")
    grace = _Grace()
    await run_beside(_serve(options, stop, grace), {"leave in time": _leave_in_time(stop, grace, leave)})


async def _leave_in_time(stop: asyncio.Event, grace: _Grace, leave: Callable[[int], NoReturn]) -> None:
    await stop.wait()
    await asyncio.sleep(grace.seconds + _LAST_S)
    log.error("left_in_mid_work", reason="told to stop, and something did not end; leases that are held run out")
    leave(1)


async def _serve(options: Options, stop: asyncio.Event, grace: _Grace) -> None:
    progress = Progress(part=f"worker/{options.worker}", role="worker")
    keys = Keys(options.run)
    health = Health(progress)
    try:
        await asyncio.to_thread(_await_server, options.redis_url, stop)
    except _ToldToStop:
        return
    async with contextlib.AsyncExitStack() as ending:
        if options.http is not None:
            from streamrl.workers.http import serving  # starlette and uvicorn: only where asked for

            at = parse_address(options.http, what="--http")
            where = await ending.enter_async_context(serving(health, at))
            log.info("answering_http", address=where)
            progress.note(http=where)
        client = await ending.enter_async_context(connect_async(options.redis_url, schema.Redis()))
        await ending.enter_async_context(report_progress(client, keys, progress))
        try:
            stream = WorkerStream(client, keys, worker=options.worker, lease_s=_FIRST_LEASE_S)
            importing = await ending.enter_async_context(_importing(options))
            info = await await_run(stream, name=options.run, stop=stop, progress=progress)
            if info is not None:
                config = config_from_json(info.config_json)
                grace.seconds = config.worker.grace_s
                if not importing.done():
                    progress.working("import vLLM")
                    await unless(stop, importing)
                if stop.is_set():
                    return
                await _Service(options, keys, config, info, health).run(client, stop)
        except RunGone:
            log.info("run_gone", run=options.run)


@contextlib.asynccontextmanager
async def _importing(options: Options) -> AsyncIterator[asyncio.Task[None]]:
    """One import at a time: what two threads import of the same packages, each may find half made."""
    with contextlib.ExitStack() as stack:
        if options.import_vllm:
            from streamrl.workers.engines.vllm_start import import_vllm_ahead

            ahead = import_vllm_ahead(stack.enter_context(scratch_folder()))
        else:
            ahead = asyncio.sleep(0)
        task = asyncio.create_task(ahead, name="import vLLM")
        try:
            yield task
        finally:
            await cancel_all([task])


class _ToldToStop(Exception):
    pass


def _await_server(url: str, stop: asyncio.Event) -> None:
    """It may be away, or come later than its workers: an exit code of 2, which nobody restarts, would be wrong."""
    num_failures = 0

    def note(why: str) -> None:
        nonlocal num_failures
        if stop.is_set():
            raise _ToldToStop
        if num_failures == 0:
            log.warning("waiting_for_redis", why=why)
        num_failures += 1

    settings = schema.Redis()
    with connect(url, settings, patience_s=settings.give_up_after_s, on_trouble=note) as client:
        check_server(client, give_up_after_s=settings.give_up_after_s)


class _Service:
    """A worker of a run that is known."""

    def __init__(self, options: Options, keys: Keys, config: schema.Config, info: RunInfo, health: Health) -> None:
        self._options = options
        self._keys = keys
        self._config = config
        self._info = info
        self._health = health
        self._progress = health.progress
        self._num_engines = 0

    async def run(self, client: redis.asyncio.Redis, stop: asyncio.Event) -> None:
        options, config = self._options, self._config
        path = allowed_model(config.model.path, override=options.model, permissions=options.permissions)
        stream = WorkerStream(
            client,
            self._keys,
            worker=options.worker,
            lease_s=config.worker.lease_s,
            give_up_after_s=config.redis.give_up_after_s,
        )
        rewards = build_rewards(config.rewards, options.permissions, options.local_reward_url, stream.spend)
        self._progress.working("load the tokenizer")
        model = await asyncio.to_thread(read_model, path, trust_remote_code=options.permissions.trust_remote_code)
        self._check_fingerprint(model)
        async with self._following(stream, model) as weights, contextlib.AsyncExitStack() as ending:
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
            )
            rollout = Rollout(
                tickets=stream,
                weights=weights,
                answerer=answerer,
                config=config,
                progress=self._progress,
            )
            self._health.parts = Parts(work=rollout, weights=weights, rewards=rewards, stall_s=config.worker.stall_s)
            supervisor = Supervisor(
                rollout=rollout,
                weights=weights,
                make_engine=partial(self._engine, model),
                progress=self._progress,
                patience=RestartPatience(
                    rejected_s=config.weights.give_up_after_s, spread_s=spread_s(config.weights.give_up_after_s)
                ),
            )
            await supervisor.run(stop)
            await stream.leave()

    def _teacher(self, model: ModelFacts) -> Teaches | None:
        settings = self._config.teacher
        if settings is None or not settings.urls:
            return None
        from streamrl.workers.rewards.teacher import build_teacher  # httpx only where it is needed

        config = self._config
        longest = config.data.max_prompt_tokens + config.max_response_tokens
        permissions = self._options.permissions
        return build_teacher(settings, permissions, model.tokenizer, model=model.path, longest=longest)

    def _check_fingerprint(self, model: ModelFacts) -> None:
        if model.fingerprint != self._info.fingerprint:
            raise ConfigError(
                f"the model at {model.path!r} has another tokenizer, end token or vocabulary size than the run's "
                f"({model.fingerprint}, the run has {self._info.fingerprint}): give this worker the run's model "
                "with --model"
            )

    @contextlib.asynccontextmanager
    async def _following(self, stream: WorkerStream, model: ModelFacts) -> AsyncIterator[WeightFollower]:
        config = self._config
        prover = None
        if config.weights.prove:  # in a thread, since it imports torch
            prover = await asyncio.to_thread(prover_of, config, model, self._progress)
        pretrained = None
        if config.model.lora is not None:
            self._progress.working("find the pretrained model")
            find = partial(PretrainedModel, model.path, trust_remote_code=model.trust_remote_code)
            pretrained = await asyncio.to_thread(find)
        with (
            mirror_folder(self._info.uid, self._options.worker) as folder,
            connect(self._options.redis_url, config.redis, patience_s=config.redis.give_up_after_s) as client,
            open_sharing(
                open_store(config.weights.store, client, self._keys),
                client,
                self._keys,
                run_uid=self._info.uid,
                share_bytes=config.weights.share_bytes,
                peers=self._options.peers,
                progress=self._progress,
            ) as sharing,
        ):
            weights = WeightFollower(
                announcements=stream,
                reading=sharing.reading,
                mirror=Mirror(folder, run_uid=self._info.uid, pretrained=pretrained, make_room=sharing.make_room),
                prover=prover,
                progress=self._progress,
                patience=Patience(
                    give_up_after_s=config.weights.give_up_after_s, first_version_s=config.learner.idle_timeout_s
                ),
                kv_cache=config.weights.kv_cache,
            )
            with contextlib.closing(weights):
                yield weights

    def _engine(self, model: ModelFacts) -> Engine:
        self._num_engines += 1
        seed = _engine_seed(self._config.seed, self._options.worker, self._num_engines)
        memory = self._options.gpu_memory
        return make_engine(EngineSettings(model=model, config=self._config, seed=seed, gpu_memory=memory))


def _engine_seed(run_seed: int, worker: str, engine: int) -> int:
    """Its own for each worker and each of its engines: the same prompt must not bring the same samples twice."""
    digest = hashlib.sha256(f"{run_seed}/{worker}/{engine}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
