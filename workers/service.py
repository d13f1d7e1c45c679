"""A worker's lifecycle: find the run, check permissions, start the engine, work, leave.

    wait for the run ─► its parts (`workers.assemble`) ─► engines, one after the other (`workers.supervise`) ─► leave
          ▲                                                                                                    │
          └──────────────── the run goes on with other settings (`workers.follow_run`) ────────────────────────┘

Returns normally, or raises the error that ended the worker. Every wait for a dependency is bounded and ends early on a
stop request. Anything that ignores the stop, such as a hanging Redis call, holds the worker for at most its grace
period plus `_EXTRA_GRACE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import structlog

from streamrl.config import schema
from streamrl.errors import RunGone
from streamrl.extras import need
from streamrl.process import parse_address
from streamrl.protocol.transport.connection import check_server, connect, connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import report_progress
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.tasks import cancel_all, run_beside, unless
from streamrl.telemetry.progress import Progress, Role
from streamrl.workers.assemble import Assembly
from streamrl.workers.follow_run import RunSettings, follow_run
from streamrl.workers.further import serve_ranks
from streamrl.workers.health import Health

if TYPE_CHECKING:
    from streamrl.workers.main import Options

log = structlog.get_logger(__name__)

_FIRST_LEASE_S = 60.0  # placeholder: no lease is taken before the run's `lease_s` is known
_EXTRA_GRACE_S = 2.5  # beyond the grace period, for handing tickets back and ending the engine


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
                        assembly = Assembly(options, keys, settings, info, health, engines)
                        async with assembly.supervisor(of_run) as supervisor:
                            await supervisor.run(stop)
                            await of_run.leave()

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
        from streamrl.workers.engines.vllm.start import import_front_end

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
