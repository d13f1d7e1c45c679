"""A worker's calls to its run: found by name, and from then on the same run or none. And the run's newest weights.

Every call may block while Redis is down, at most `give_up_after_s`, and is retried. RunGone: the run was removed, or
another took its name; the worker has nothing left to do here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import redis
import redis.asyncio
import structlog

from streamrl.errors import OtherSchema, RunGone
from streamrl.protocol.transport import worker_scripts as scripts
from streamrl.protocol.transport.connection import bounded_block_ms, repeat_async
from streamrl.protocol.transport.entries import to_run_info
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import Argument, Call, Script, run_async
from streamrl.protocol.transport.types import Announcement, RunInfo
from streamrl.protocol.wire.codec import SCHEMA

_POLL_S = 0.05  # between two looks for a version when announcements cannot be read


class WorkerRun:
    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, give_up_after_s: float) -> None:
        self.client = client
        self.keys = keys
        self.uid: str | None = None  # once it is known
        # Makes a call that may be retried.
        self.retrying = partial(repeat_async, client, give_up_after_s=give_up_after_s)

    async def info(self) -> RunInfo | None:
        """Return the run, or None (not yet, or no longer: the server was emptied, and the learner will restore it).

        OtherSchema: its learner is of another version of streamrl, and neither can read what the other writes. Of a run
        that has ended, any version may be the next learner's.
        """

        async def read() -> list[Any]:
            # Not a transaction, which a full Redis refuses even for reads. The order suffices: removal replaces meta by
            # the tombstone in one step.
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hgetall(self.keys.meta)
                pipe.get(self.keys.tombstone)
                return await pipe.execute()

        meta, tombstone = await self.retrying("read the run", read)
        info = to_run_info(self.keys.name, meta)
        if info is not None and info.state == "running":
            _check_schema(meta)
        known = self.uid
        if known is not None and (tombstone == known.encode() if info is None else info.uid != known):
            raise self._gone()
        if info is not None:
            self.uid = info.uid
        return info

    async def call_script(self, what: str, script: Script, keys: Sequence[str], *args: Argument) -> list[Any] | None:
        """Call a script of this run; return its reply after OK, or None if there is no run."""
        return await self.with_uid(what, lambda uid: self.call_script_once(uid, script, keys, *args))

    async def call_script_once(self, uid: str, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """Call a script without retries; return its whole reply."""
        call = Call(script, (self.keys.meta, self.keys.tombstone, *keys), (uid, *args))
        return await run_async(self.client, call)

    async def with_uid(self, what: str, call: Callable[[str], Awaitable[Any]]) -> list[Any] | None:
        """Like `call_script`, with a function that gets the run's uid for `call_script_once`; a retry repeats it."""
        if self.uid is None and await self.info() is None:
            return None
        uid = self.uid
        assert uid is not None
        status, *rest = await self.retrying(what, lambda: call(uid))
        if status == b"GONE":
            raise self._gone()
        return rest if status == b"OK" else None

    def _gone(self) -> RunGone:
        return RunGone(f"run {self.keys.name!r} was removed from Redis, or another took its name")


class AnnouncementReader:
    """The newest announced weights, and the wait for newer ones.

        worker: latest ─► nothing new ─► XREAD BLOCK beyond what it knows ─► an entry, or timeout ─► latest ...
        learner: the script that announces adds the entry, whose id is the version

    The entry is only a wake-up; `latest` reads what was announced. So a lost entry, or one that cannot be read, costs a
    wait and no version: the caller looks again anyway. Versions only grow, even when Redis is lost, so nothing need be
    remembered to get the next one. Each version wakes a worker once, so that one whose manifest was lost causes no busy
    loop. Blocks as `WorkerRun` does, `await_newer` for the given time.
    """

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._latest: Announcement | None = None
        self._woken_for = 0  # the newest version that woke us
        self._failure_is_logged = False  # announcements cannot be read, and that was logged

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        """Return the newest version and its manifest, read again only if `anew`: an anchor may have been added."""
        known = self._latest.version if self._latest and not anew else 0
        keys = [self._run.keys.weights, self._run.keys.manifests]
        reply = await self._run.call_script("read the latest version", scripts.LATEST, keys, known)
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
        found: Any = await self._run.retrying("read a manifest", read)
        return found if found is None else bytes(found)


def _check_schema(meta: Mapping[bytes, bytes]) -> None:
    theirs = meta.get(b"schema", b"").decode(errors="replace")
    if theirs and theirs != str(SCHEMA):  # its tickets would stay leased by a worker that cannot read them
        raise OtherSchema(
            f"this run's learner writes messages of schema {theirs}, and this worker reads schema {SCHEMA}: install "
            "the same version of streamrl for both"
        )
