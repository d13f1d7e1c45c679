"""One address and two servers, of which it leads to one; and what a fail-over does that loses the last writes.

The address is a symbolic link to the socket of the server in charge. `fail_over` fills the other one with an older
copy of the data, lets the address lead to it, and ends every connection: so writes since that copy never happened, the
run id of the server is another one, and ids of stream entries that were given since may be given again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.protocol.transport.embedded import EmbeddedRedis

Copy = Mapping[bytes, tuple[bytes, int]]  # by key: the value, and how many milliseconds it still lives (0: for ever)


class Luck:
    """How the commands of a client fare: well, until `lose_reply` says which one takes effect and loses its reply."""

    def __init__(self) -> None:
        self._left = 0
        self.num_lost = 0

    def lose_reply(self, nth: int) -> None:
        """The reply to the nth command from now; 0: to none."""
        self._left = nth

    def check(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self.num_lost += 1
                raise redis.ConnectionError("the reply was lost")


class LossyRedis(redis.Redis):
    luck: Luck

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        reply = super().parse_response(connection, command_name, **options)
        self.luck.check()
        return reply


class LossyAsyncRedis(redis.asyncio.Redis):
    luck: Luck

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = await super().execute_command(*args, **options)
        self.luck.check()
        return reply


class TwoServers:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "redis.sock"
        self._servers = [EmbeddedRedis.start(folder / name) for name in ("a", "b")]
        self._admins = [_client(redis.Redis, server.url) for server in self._servers]
        self._in_charge = 0
        self._link()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    @property
    def admin(self) -> redis.Redis:
        """A client of the server in charge, for whoever looks from outside."""
        return self._admins[self._in_charge]

    def client(self) -> LossyRedis:
        client = _client(LossyRedis, self.url)
        client.luck = Luck()
        return client

    def async_client(self) -> LossyAsyncRedis:
        client = LossyAsyncRedis.from_url(
            self.url, protocol=2, socket_timeout=5.0, retry=AsyncRetry(NoBackoff(), 0), decode_responses=False
        )
        assert isinstance(client, LossyAsyncRedis)
        client.luck = Luck()
        return client

    def copy(self) -> Copy:
        """All that the server in charge holds."""
        keys = self.admin.keys()
        with self.admin.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.dump(key)
                pipe.pttl(key)
            replies = pipe.execute()
        found = zip(keys, replies[::2], replies[1::2], strict=True)
        return {key: (value, max(0, ttl)) for key, value, ttl in found if value is not None}

    def fail_over(self, copy: Copy) -> None:
        """The other server is in charge from now on, with this data. Who was connected must connect again."""
        self._in_charge = 1 - self._in_charge
        with self.admin.pipeline(transaction=False) as pipe:
            pipe.flushall()
            for key, (value, ttl) in copy.items():
                pipe.restore(key, ttl, value)
            pipe.execute()
        self._link()

    def _link(self) -> None:
        aside = self._path.with_suffix(".new")
        aside.symlink_to(self._servers[self._in_charge].url.removeprefix("unix://"))
        aside.rename(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for admin, server in zip(self._admins, self._servers, strict=True):
            admin.close()
            server.stop()


def _client(kind: type[redis.Redis], url: str) -> Any:
    return kind.from_url(url, protocol=2, socket_timeout=5.0, retry=Retry(NoBackoff(), 0))
