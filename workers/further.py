"""Assembles a further host of an engine (`hosts.further`), for `streamrl worker --join`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from streamrl.errors import ConfigError
from streamrl.held_folders import scratch_folder
from streamrl.process import parse_address
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.model import find_model
from streamrl.workers.follow_run import RunSettings
from streamrl.workers.hosts.copy import Copy
from streamrl.workers.hosts.further import FirstHost, FurtherHost
from streamrl.workers.weights.mirrored import open_mirror

if TYPE_CHECKING:
    import asyncio

    from streamrl.workers.engines.vllm.headless import HeadlessRanks
    from streamrl.workers.main import Options


async def serve_ranks(
    options: Options,
    keys: Keys,
    settings: RunSettings,
    info: RunInfo,
    stream: WorkerStream,
    progress: Progress,
    stop: asyncio.Event,
) -> None:
    """Serve ranks until stopped by a signal or by the first host, or until the run ends or has other settings."""
    config = settings.config
    assert options.join is not None, "a further host has the address of its first one"
    worker = config.worker
    if worker.hosts == 1:
        raise ConfigError(f"--join {options.join}: the run has worker.hosts = 1, so its engines take no further hosts")
    first = FirstHost(
        at=parse_address(options.join, what="--join"),
        run_uid=info.uid,
        start_timeout_s=worker.start_timeout_s,
        grace_s=worker.grace_s,
    )
    model = await find_model(config, info, override=options.model, permissions=options.permissions, progress=progress)

    async def secret() -> bytes | None:
        now = await stream.run_info()
        is_over = now is None or now.state != "running" or settings.differ_in(now)
        return None if is_over else await stream.secret()

    async with open_mirror(
        config,
        model,
        keys,
        run_uid=info.uid,
        worker=options.worker,
        redis_url=options.redis_url,
        peers=options.peers,
        progress=progress,
    ) as mirrored:
        copy = Copy(
            look_up=stream.announcements.manifest,
            mirror=mirrored.mirror,
            reading=mirrored.reading,
            num_read=mirrored.num_read,
        )
        with contextlib.closing(copy), scratch_folder() as scratch:

            def make_ranks(meeting: Meeting, seed: int) -> HeadlessRanks:
                from streamrl.workers.engines.vllm.headless import HeadlessRanks  # imports torch and vLLM

                of_engine = EngineSettings(model=model, config=config, seed=seed, gpu_memory=options.gpu_memory)
                return HeadlessRanks(of_engine, meeting, mirror=mirrored.mirror.path, scratch=scratch)

            host = FurtherHost(
                name=options.worker, first=first, secret=secret, copy=copy, make_ranks=make_ranks, progress=progress
            )
            await host.run(stop)
