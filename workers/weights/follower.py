"""Follows the learner's announcements and loads new versions into the engine.

    announcement ─► manifests: cheapest path in bytes ─► fetch and patch, in a thread ─► load ─► served ─► proved
                                   (generation goes on; only the load pauses it)

The newest version wins: versions announced while another was on its way are skipped. Incomplete or corrupt data is
fetched again from the newest announcement, with backoff, for at most `give_up_after_s` since the first failure; a fetch
that goes well may take longer. Meanwhile the engine serves the version it has. A version is served once loaded, and
proved once the engine's weights were compared to the mirror (see `proving`); until then its samples must not leave the
worker. LoadRejected: they differ, and the engine's weights are unusable.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from streamrl.errors import LoadRejected, RunGone, TransportError, WeightsError
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.catchup import way_to
from streamrl.protocol.weights.changes import Changed
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import decode_manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.stores import Blobs
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version, show
from streamrl.workers.engines.base import Engine, KvCache, Load
from streamrl.workers.proofs.proving import Prover
from streamrl.workers.weights.roles import Announcements, FurtherMirrors

log = structlog.get_logger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    look_again_s: float = 1.0  # poll interval, for a missed wake-up
    give_up_after_s: float  # since the first of consecutive failures to fetch, or without a byte on a further host
    first_version_s: float  # for the learner's first announcement


class WeightFollower:
    """Implements `workers.weights.roles.Weights`; owns the mirror and the thread that patches it."""

    def __init__(
        self,
        *,
        announcements: Announcements,
        reading: Callable[[Sequence[Manifest]], Blobs],  # where to read blobs of these versions from
        mirror: Mirror,
        prover: Prover | None,  # None: versions are verified by digests alone
        progress: Progress,
        patience: Patience,
        kv_cache: KvCache = "salt",  # what a load does with the KV cache of older versions
        further: FurtherMirrors | None = None,  # set for an engine over several hosts
    ) -> None:
        self.version = 0  # served by the engine; 0: none yet
        self.attempted = self.num_proved = self.proved_version = 0
        self._announcements = announcements
        self._reading = reading
        self._mirror = mirror
        self._held: Manifest | None = None  # manifest of the mirror's version
        self._changed: Changed | None = None  # delta of the mirror since the version that the engine serves
        self._kv_cache = kv_cache
        self._prover = prover
        self._rehearsed: Engine | None = None  # the last engine that loaded a decoy
        self._distrusted = self._further_distrusted = False
        self._further = further
        self._progress = progress
        self._patience = patience
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirror")
        self._patching: asyncio.Future[None] | None = None
        self._served = asyncio.Condition()
        self._num_loads = self._num_loads_in_flight = 0

    async def follow(self, engine: Engine) -> None:
        if self._patching is not None:  # started for a previous engine, which has died
            await asyncio.wait([self._patching])
        if self._distrusted:
            self._mirror.close()
            self._distrusted, self._further_distrusted = False, True
        try:
            while True:
                announcement = await self._next_announcement()
                await self._fetch(announcement)
                await self._load(engine)
        finally:
            self.version = self.proved_version = 0

    def distrust_mirror(self) -> None:
        self._distrusted = True

    async def serving(self, version: int) -> None:
        async with self._served:
            await self._served.wait_for(lambda: self.version >= max(version, 1))

    async def proved(self, version: int) -> None:
        async with self._served:
            await self._served.wait_for(lambda: self.proved_version >= version)

    async def newer_than(self, version: int) -> Announcement:
        while True:
            announcement = await self._announcements.latest()
            if announcement is not None and announcement.version > version:
                return announcement
            await self._announcements.await_newer(version, within_s=self._patience.look_again_s)

    async def announced_in(self, term: int) -> None:
        await self._first_newer_than(make_version(term, 0) - 1)

    def close(self) -> None:
        """Remove the mirror's file. A patch still running in the thread ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._mirror.close()

    async def _next_announcement(self) -> Announcement:
        """Wait for a version newer than the engine's."""
        return await (self.newer_than(self.version) if self.version else self._first_newer_than(0))

    async def _first_newer_than(self, version: int) -> Announcement:
        limit_s = self._patience.first_version_s
        try:
            async with asyncio.timeout(limit_s):
                return await self.newer_than(version)
        except TimeoutError:
            raise WeightsError(f"the learner announced no weights within {limit_s:g} s") from None

    async def _fetch(self, announcement: Announcement) -> None:
        """Bring all mirrors, including those on further hosts, to this version or, if that fails, to a newer one."""
        began = time.monotonic()
        deadline = None
        pause_s = _FIRST_PAUSE_S
        while self._mirror.version < announcement.version or self._further is not None:
            try:
                await self._bring(announcement)
            except RunGone:
                raise
            except (WeightsError, TransportError) as error:  # data lost or damaged, or the store is unavailable
                now = time.monotonic()
                deadline = now + self._patience.give_up_after_s if deadline is None else deadline
                if now > deadline:  # a TransportError would mean that Redis is away
                    raise WeightsError(str(error)) from error
                log.warning("version_not_fetched", version=show(announcement.version), error=str(error))
            else:
                self._progress.note(weights_fetch_s=round(time.monotonic() - began, 3))
                return
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            announcement = await self._announcements.latest(anew=True) or announcement

    async def _bring(self, announcement: Announcement) -> None:
        """Update all hosts at once, so that they can fetch missing data from each other. Wait for all of them, since
        no retry may start on a mirror that is still being patched."""
        hosts = []
        if self._mirror.version < announcement.version:
            hosts.append(self._patch(announcement))
        if self._further is not None:
            version = max(self._mirror.version, announcement.version)
            hosts.append(self._bring_further(self._further, version))
        for outcome in await asyncio.gather(*hosts, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _bring_further(self, further: FurtherMirrors, version: int) -> None:
        limit_s = self._patience.give_up_after_s
        loop = asyncio.get_running_loop()

        def bytes_arrived() -> None:
            if not limit.expired():
                limit.reschedule(loop.time() + limit_s)

        try:
            async with asyncio.timeout(limit_s) as limit:
                await further.bring(version, refetch=self._further_distrusted, bytes_arrived=bytes_arrived)
        except TimeoutError:
            raise WeightsError(
                f"the further hosts do not all have version {show(version)}, and none of it arrived there within "
                f"weights.give_up_after_s={limit_s:g}"
            ) from None
        self._further_distrusted = False

    async def _patch(self, announcement: Announcement) -> None:
        target = decode_manifest(announcement.manifest)
        path = await way_to(target, self._announcements.manifest, have=self._mirror.version)

        def patch() -> None:
            self._mirror.apply_path(path, self._reading(path))
            self._held, self._changed = target, self._mirror.changed(since=self.version)

        self._patching = asyncio.get_running_loop().run_in_executor(self._thread, patch)
        await asyncio.shield(self._patching)  # cancellation leaves the thread running; `follow` waits for it

    async def _load(self, engine: Engine) -> None:
        manifest = self._held
        assert manifest is not None, "the mirror holds what was fetched"
        self.attempted = manifest.version
        try:
            if self._prover is not None and engine is not self._rehearsed:
                await self._prover.rehearse(engine, self._mirror.path)
                self._rehearsed = engine
            await self._serve(engine, manifest)
            if self._prover is not None:
                await self._prover.check(engine, self._mirror.path, manifest)
        except LoadRejected as error:
            self._progress.note(rejected=str(error), rejected_version=show(manifest.version))
            raise
        self.num_proved += 1
        self._progress.advanced(
            version=manifest.version,
            step=manifest.step,
            loads=self._num_loads,
            loads_in_flight=self._num_loads_in_flight,
            rejected="",
            rejected_version="",
        )
        async with self._served:
            self.proved_version = manifest.version
            self._served.notify_all()

    async def _serve(self, engine: Engine, manifest: Manifest) -> None:
        in_flight = engine.stats().in_flight
        began = time.monotonic()
        changed, self._changed = self._changed, None
        if changed is not None and changed.since != self.version:  # patched for a previous engine
            changed = None
        if manifest.adapters and not self._num_loads:
            log.info("loads_all_weights", reason="each version is adapters, which are merged into all of the model")
        await engine.load(
            Load(
                weights=self._mirror.path,
                version=manifest.version,
                step=manifest.step,
                kv_cache=self._kv_cache,
                changed=changed,
            )
        )
        self._mirror.loaded()
        self._num_loads += 1
        self._num_loads_in_flight += in_flight > 0
        log.info(
            "version_loaded",
            version=show(manifest.version),
            step=manifest.step,
            in_flight=in_flight,
            seconds=round(time.monotonic() - began, 4),
        )
        async with self._served:
            self.version = manifest.version
            self._served.notify_all()
