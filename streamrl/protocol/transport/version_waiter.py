"""A worker's ear for announcements: who waits for a version is woken by it, instead of asking again and again.

    worker: latest ─► nothing new ─► XREAD BLOCK beyond what it knows ─► an entry, or time is up ─► latest ...
    learner: the script that announces adds the entry, whose id is the version

The entry is a bell and nothing else: what is announced is for `latest` to say. So a bell that is lost, or whose server
cannot be heard, costs a wait and no version: the caller looks again all the same. Versions only grow, over the loss of
Redis too, so nothing need be remembered to hear the next one; each wakes a worker once, so that one whose manifest was
lost is not asked for in a circle. Blocks for the time that the caller gives (some seconds at most), on a connection
that the client's pool gives to no other call meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import redis
import redis.asyncio
import structlog

from streamrl.protocol.transport.connection import bounded_block_ms
from streamrl.protocol.transport.keys import Keys

_POLL_S = 0.05  # between two looks where nothing can be heard


class VersionWaiter:
    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._heard = 0
        self._warned = False

    async def beyond(self, version: int, *, within_s: float) -> bool:
        """Whether a newer one was announced, and not heard before."""
        since = max(version, self._heard)
        block = bounded_block_ms(self._client, int(1000 * within_s))
        try:
            reply: Any = await self._client.xread({self._keys.announced: f"{since}-0"}, count=1, block=block)
        except redis.RedisError as error:  # the caller's next look finds out whether Redis is away
            self._warn_once(error)
            await asyncio.sleep(min(within_s, _POLL_S * random.uniform(0.5, 1.0)))
            return False
        if not reply:
            return False
        [[_, [(entry_id, _)]]] = reply
        self._heard = int(entry_id.partition(b"-")[0])
        return True

    def _warn_once(self, error: redis.RedisError) -> None:
        passing = isinstance(error, redis.ConnectionError | redis.TimeoutError)
        if not passing and not self._warned:
            self._warned = True
            structlog.get_logger().warning("announcements_not_heard", error=str(error), looks_every_s=_POLL_S)
