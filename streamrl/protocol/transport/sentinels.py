"""Connections to the server that sentinels call the master: each asks them periodically, and moves when the master
moves.

    connect (before each command) ─► last asked over a second ago? ─► the master moved: disconnect, connect there

The library asks when a connection is made, and never again while it lasts. A master that stalled, or was partitioned,
comes back as a master and accepts writes until the sentinels demote it: usually ten seconds, and longer while a busy
machine makes them doubt its health. A client that stays there waits for tickets that are elsewhere. If no sentinel
answers, existing connections stay: a run must not end because of the sentinels.
"""

from __future__ import annotations

import time
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.sentinel import SentinelManagedConnection as AsyncManaged
from redis.asyncio.sentinel import SentinelManagedSSLConnection as AsyncManagedSsl
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from streamrl.protocol.transport.secret_files import RereadsAuthority

_ASK_EVERY_S = 1.0
_AWAY_S = 30.0  # pause before asking again: detecting that they are down may take seconds
_REPLY_S = 2.0


def of_sentinels(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of connections to the sentinels, with short timeouts, since their replies are short."""
    times = ("socket_timeout", "socket_connect_timeout")
    return {**options, **{name: min(_REPLY_S, options.get(name) or _REPLY_S) for name in times}}


class _Following:
    """A connection's state towards its sentinels."""

    host: Any
    port: Any
    connection_pool: Any
    _ask_at = 0.0

    def _is_due(self) -> bool:
        return time.monotonic() >= self._ask_at

    def _schedule_next_ask(self, *, answered: bool) -> None:
        self._ask_at = time.monotonic() + (_ASK_EVERY_S if answered else _AWAY_S)

    def _is_at_the_master(self) -> bool:
        """Whether it is connected to the master, as far as this client's pool knows."""
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
            self._schedule_next_ask(answered=False)
        else:
            self._schedule_next_ask(answered=True)


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
            self._schedule_next_ask(answered=False)
        else:
            self._schedule_next_ask(answered=True)


class AsyncMasterSslConnection(RereadsAuthority, AsyncMasterConnection, AsyncManagedSsl):
    pass
