"""The newest announced weights, and the wait for newer ones.

    worker: latest ─► nothing new ─► XREAD BLOCK beyond what it knows ─► an entry, or timeout ─► latest ...
    learner: the script that announces adds the entry, whose id is the version

The entry is only a wake-up; `latest` reads what was announced. So a lost entry, or one that cannot be read, costs a
wait and no version: the caller looks again anyway. Versions only grow, even when Redis is lost, so nothing need be
remembered to get the next one. Each version wakes a worker once, so that one whose manifest was lost causes no busy
loop. Blocks as `WorkerRun` does, `await_newer` for the given time.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import redis
import structlog

from streamrl.protocol.transport import worker_scripts as scripts
from streamrl.protocol.transport.connection import bounded_block_ms
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.transport.worker_run import WorkerRun

_POLL_S = 0.05  # between two looks for a version when announcements cannot be read


class AnnouncementReader:
    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._latest: Announcement | None = None
        self._woken_for = 0  # the newest version that woke us
        self._failure_is_logged = False  # announcements cannot be read, and that was logged

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        """Return the newest version and its manifest, read again only if `anew`: an anchor may have been added."""
        known = self._latest.version if self._latest and not anew else 0
        keys = [self._run.keys.weights, self._run.keys.manifests]
        reply = await self._run.call("read the latest version", scripts.LATEST, keys, known)
        match reply:
            case [version, base, step, manifest]:
                self._latest = Announcement(version=int(version), base=int(base), step=int(step), manifest=manifest)
            case [_]:
                pass  # unchanged
            case _:
                return None
        return self._latest

    async def await_newer(self, version: int, *, within_s: float) -> bool:
        """Wait until a version newer than `version` is announced that has not woken this worker before.

        False: no announcement arrived; `latest` shows whether there is a version all the same. Blocks some seconds at
        most, on a connection of its own from the client's pool.
        """
        since = max(version, self._woken_for)
        block = bounded_block_ms(self._run.client, int(1000 * within_s))
        try:
            reply: Any = await self._run.client.xread({self._run.keys.announced: f"{since}-0"}, count=1, block=block)
        except redis.RedisError as error:  # the caller's next look finds out whether Redis is down
            if not self._failure_is_logged and not isinstance(error, redis.ConnectionError | redis.TimeoutError):
                self._failure_is_logged = True
                structlog.get_logger().warning("announcements_unreadable", error=str(error), looks_every_s=_POLL_S)
            await asyncio.sleep(min(within_s, _POLL_S * random.uniform(0.5, 1.0)))
            return False
        if not reply:
            return False
        [[_, [(entry_id, _)]]] = reply
        self._woken_for = int(entry_id.partition(b"-")[0])
        return True

    async def manifest(self, version: int) -> bytes | None:
        read = partial(self._run.client.hget, self._run.keys.manifests, str(version))
        found: Any = await self._run.ask("read a manifest", read)
        return found if found is None else bytes(found)
