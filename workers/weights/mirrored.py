"""Opens a worker's mirror of the weights and its sources: the folder, the store, and sharing between hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from streamrl.config import schema
from streamrl.held_folders import mirror_folder
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import Blobs, open_store
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.sharing.opening import open_sharing
from streamrl.workers.weights.pretrained import PretrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    mirror: Mirror
    reading: Callable[[Sequence[Manifest]], Blobs]  # where to read blobs of these versions from
    num_read: Callable[[], int]  # bytes so far: of pieces where hosts share blobs, else of whole blobs


@contextlib.asynccontextmanager
async def open_mirror(
    config: schema.Config,
    model: ModelFacts,
    keys: Keys,
    *,
    run_uid: str,
    worker: str,
    redis_url: str,
    peers: str | None,
    progress: Progress,
) -> AsyncIterator[Mirrored]:
    pretrained = None
    if config.model.lora is not None:
        progress.starting("find the pretrained model")
        find = partial(PretrainedModel, model.path, trust_remote_code=model.trust_remote_code)
        pretrained = await asyncio.to_thread(find)
    # In a thread, since Redis may be away again: signals and probes are answered meanwhile.
    patient = partial(connect, redis_url, config.redis, patience_s=config.redis.give_up_after_s)
    with (
        await asyncio.to_thread(patient) as client,
        mirror_folder(run_uid, worker) as folder,
        open_sharing(
            open_store(config.weights.store, client, keys),
            client,
            keys,
            run_uid=run_uid,
            share_bytes=config.weights.share_bytes,
            peers=peers,
            progress=progress,
        ) as sharing,
    ):
        mirror = Mirror(folder, run_uid=run_uid, pretrained=pretrained, make_room=sharing.make_room)
        yield Mirrored(mirror=mirror, reading=sharing.reading, num_read=lambda: sharing.counts.total)
