"""A learner that publishes to memory, and a worker's follower with an engine double."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import MemoryStore
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.proofs.proving import Prover
from streamrl.workers.weights.follower import Patience, WeightFollower
from streamrl.workers.weights.roles import AnnouncementsDouble, FurtherMirrors
from tests.weights_world import RUN_UID, State, World, nudged, random_state

PATIENCE = Patience(look_again_s=600.0, give_up_after_s=0.5, first_version_s=0.5)


class Follower:
    """A learner that publishes, and a worker that follows it."""

    def __init__(
        self,
        folder: Path,
        store: MemoryStore | None = None,
        announcements: AnnouncementsDouble | None = None,
        patience: Patience = PATIENCE,
        further: FurtherMirrors | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        self.world = World(self.store)
        self.announcements = announcements or AnnouncementsDouble()
        self.engine = EngineDouble()
        self.mirror = Mirror(folder, run_uid=RUN_UID)
        self.progress = Progress(part="worker/0", role="worker")
        tokenizer: Any = None
        facts = ModelFacts(
            path="model",
            tokenizer=tokenizer,
            stop_ids=(1,),
            vocab_size=8,
            max_positions=None,
            fingerprint="model",
            trust_remote_code=False,
        )
        self.weights = WeightFollower(
            announcements=self.announcements,
            reading=lambda path: self.store,
            mirror=self.mirror,
            prover=Prover(model=facts, dtype="float32", progress=self.progress),
            progress=self.progress,
            patience=patience,
            further=further,
        )
        self._rng = np.random.default_rng(0)
        self.state: State = random_state(self._rng)

    def publish(self, *, anchor: bool = False) -> Manifest:
        manifest = self.world.publish(self.state, anchor=anchor)
        self.state = nudged(self._rng, self.state)
        announcement = Announcement(
            version=manifest.version, base=manifest.base, step=manifest.step, manifest=encode_manifest(manifest)
        )
        self.announcements.announce(announcement)
        return manifest

    @contextlib.asynccontextmanager
    async def following(self, engine: EngineDouble | None = None) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.weights.follow(engine or self.engine), name="follow")
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def serves(self, manifest: Manifest) -> None:
        async with asyncio.timeout(10):
            await self.weights.serving(manifest.version)
        assert self.weights.version == manifest.version
