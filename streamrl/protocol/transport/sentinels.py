"""Connections to the server that sentinels call the master: each asks them again now and then, and moves when it moved.

    connect (before each command) ─► asked a second ago? ─► the master is elsewhere: leave this server, go there

The library asks when a connection is made, and never again while it holds. A master that slept, or was cut off, wakes
up as one and takes writes until the sentinels make it a replica: ten seconds as a rule, and for as long as a busy
machine makes them doubt that it is well. Who stays there waits for tickets that lie elsewhere. Where no sentinel
answers, what is connected stays so: a run must not end for their sake.
"""

from __future__ import annotations

import time
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.sentinel import SentinelManagedConnection as AsyncManaged
from redis.asyncio.sentinel import SentinelManagedSSLConnection as AsyncManagedSsl
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from streamrl.protocol.transport.secret_files import AuthorityReadAnew

_ASK_EVERY_S = 1.0
_AWAY_S = 30.0  # they are not asked again for so long: to find out that they are away may take seconds
_REPLY_S = 2.0


def of_sentinels(options: dict[str, Any]) -> dict[str, Any]:
    """Options of connections to the sentinels themselves, whose answers are short: nobody waits for them for long."""
    times = ("socket_timeout", "socket_connect_timeout")
    return {**options, **{name: min(_REPLY_S, options.get(name) or _REPLY_S) for name in times}}


class _Following:
    """What a connection knows of its sentinels."""

    host: Any
    port: Any
    connection_pool: Any
    _ask_at = 0.0

    def _is_due(self) -> bool:
        return time.monotonic() >= self._ask_at

    def _asked(self, *, answered: bool) -> None:
        self._ask_at = time.monotonic() + (_ASK_EVERY_S if answered else _AWAY_S)

    def _is_at_the_master(self) -> bool:
        """As this client's connections know it."""
        return bool((self.host, self.port) == self.connection_pool.master_address)


class MasterConnection(_Following, SentinelManagedConnection):
    def connect(self) -> None:
        if self._sock is not None and self._is_due():
            self._ask()
        if self._sock is not None and not self._is_at_the_master():
            self.disconnect()
        super().connect()  # type: ignore[no-untyped-call]

    def _ask(self) -> None:
        try:
            self.connection_pool.get_master_address()
        except redis.RedisError:
            self._asked(answered=False)
        else:
            self._asked(answered=True)


class MasterSslConnection(MasterConnection, SentinelManagedSSLConnection):
    pass


class AsyncMasterConnection(_Following, AsyncManaged):
    async def connect(self) -> None:
        if self._reader is not None and self._is_due():
            await self._ask()
        if self._reader is not None and not self._is_at_the_master():
            await self.disconnect()
        await super().connect()  # type: ignore[no-untyped-call]

    async def _ask(self) -> None:
        try:
            await self.connection_pool.get_master_address()
        except redis.RedisError:
            self._asked(answered=False)
        else:
            self._asked(answered=True)


class AsyncMasterSslConnection(AuthorityReadAnew, AsyncMasterConnection, AsyncManagedSsl):
    pass
