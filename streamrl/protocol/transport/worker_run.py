"""A worker's calls to its run: found by name, and from then on the same run or none.

Every call may block while Redis is down, at most `give_up_after_s`, and is retried. RunGone: the run was removed, or
another took its name; the worker has nothing left to do here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import redis.asyncio

from streamrl.errors import OtherSchema, RunGone
from streamrl.protocol.transport.connection import repeat_async
from streamrl.protocol.transport.entries import to_run_info
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import Argument, Call, Script, run_async
from streamrl.protocol.transport.types import RunInfo
from streamrl.protocol.wire.codec import SCHEMA


class WorkerRun:
    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, give_up_after_s: float) -> None:
        self.client = client
        self.keys = keys
        self.uid: str | None = None  # once it is known
        self.ask = partial(repeat_async, client, give_up_after_s=give_up_after_s)  # runs a call that may be retried

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

        meta, tombstone = await self.ask("read the run", read)
        info = to_run_info(self.keys.name, meta)
        if info is not None and info.state == "running":
            _check_schema(meta)
        known = self.uid
        if known is not None and (tombstone == known.encode() if info is None else info.uid != known):
            raise self._gone()
        if info is not None:
            self.uid = info.uid
        return info

    async def call(self, what: str, script: Script, keys: Sequence[str], *args: Argument) -> list[Any] | None:
        """Call a script of this run; return its reply after OK, or None if there is no run."""
        return await self.do(what, lambda uid: self.run(uid, script, keys, *args))

    async def run(self, uid: str, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        """Call a script once, without retries; return its whole reply."""
        call = Call(script, (self.keys.meta, self.keys.tombstone, *keys), (uid, *args))
        return await run_async(self.client, call)

    async def do(self, what: str, call: Callable[[str], Awaitable[Any]]) -> list[Any] | None:
        """Like `call`, with a function that calls `run` with the run's uid, and is repeated in a retry."""
        if self.uid is None and await self.info() is None:
            return None
        uid = self.uid
        assert uid is not None
        status, *rest = await self.ask(what, lambda: call(uid))
        if status == b"GONE":
            raise self._gone()
        return rest if status == b"OK" else None

    def _gone(self) -> RunGone:
        return RunGone(f"run {self.keys.name!r} was removed from Redis, or another took its name")


def _check_schema(meta: Mapping[bytes, bytes]) -> None:
    theirs = meta.get(b"schema", b"").decode(errors="replace")
    if theirs and theirs != str(SCHEMA):  # its tickets would stay leased by a worker that cannot read them
        raise OtherSchema(
            f"this run's learner writes messages of schema {theirs}, and this worker reads schema {SCHEMA}: install "
            "the same version of streamrl for both"
        )
