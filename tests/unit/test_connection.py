"""What is repeated, how long, and what its error says; no server is needed to know."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio
from redis._parsers.base import BaseParser

from streamrl.errors import ConfigError, TransportError
from streamrl.protocol.transport.clients import open_client, server_name
from streamrl.protocol.transport.connection import bounded_block_ms, pacing, repeat, repeat_async


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with redis.Redis(host="stream.example", port=7000, db=2, password="secret", socket_timeout=4.0) as client:
        yield client


@pytest.fixture
async def async_client() -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis(host="stream.example", port=7000, db=2, password="secret") as client:
        yield client


PASSING = [
    redis.ConnectionError("Connection refused"),
    redis.TimeoutError("Timeout reading"),
    redis.BusyLoadingError("Redis is loading the dataset in memory"),
    redis.ReadOnlyError("You can't write against a read only replica."),
    redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
    redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
    *(
        BaseParser.parse_error(text)
        for text in (
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            "CLUSTERDOWN The cluster is down",
            "TRYAGAIN Multiple keys request during rehashing of slot",
            "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        )
    ),
    redis.ResponseError("ERR Error running script: -OOM command not allowed when used memory > 'maxmemory'."),
]
LASTING = [
    redis.AuthenticationError("invalid username-password pair"),
    redis.exceptions.NoPermissionError("this user has no permissions to run the 'xadd' command"),
    redis.exceptions.NoPermissionError("this user has no permissions to access the 'streamrl:{BLOOM-OOM}:meta' key"),
    redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
    redis.ResponseError("BUSYGROUP Consumer Group name already exists"),
]


class Flaky:
    """Fails with these errors, one a call, and then answers."""

    def __init__(self, *errors: redis.RedisError) -> None:
        self._errors = list(errors)
        self.num_calls = 0

    def __call__(self) -> str:
        self.num_calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "answer"

    async def call(self) -> str:
        return self()


@pytest.mark.parametrize("error", PASSING, ids=str)
async def test_an_error_that_passes_is_waited_out(
    error: redis.RedisError, client: redis.Redis, async_client: redis.asyncio.Redis
) -> None:
    noted: list[redis.RedisError] = []
    flaky = Flaky(error, error)
    assert repeat(client, "answer", flaky, give_up_after_s=10.0, on_trouble=noted.append) == "answer"
    assert flaky.num_calls == 3
    assert noted == [error, error]
    assert await repeat_async(async_client, "answer", Flaky(error).call, give_up_after_s=10.0) == "answer"


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_an_error_that_stays_is_raised_at_once(error: redis.RedisError, client: redis.Redis) -> None:
    flaky = Flaky(error)
    with pytest.raises(TransportError, match=r"Redis at stream\.example:7000/2 could not deliver: "):
        repeat(client, "deliver", flaky, give_up_after_s=10.0)
    assert flaky.num_calls == 1


@pytest.mark.parametrize(
    "url", ["redis://host:1/0?password=hunter2", "unix:///run/x.sock?password=hunter2", "redis://u:hun/ter2@host"]
)
def test_a_password_where_all_would_see_it_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_client(url)
    assert not re.search("hunter2|ter2", str(refused.value))


async def test_patience_ends_with_the_servers_name_and_no_password(async_client: redis.asyncio.Redis) -> None:
    error = PASSING[0]
    for give_up_after_s in (0.0, 0.1):
        flaky = Flaky(*[error] * 1000)
        with pytest.raises(TransportError) as caught:
            await repeat_async(async_client, "lease", flaky.call, give_up_after_s=give_up_after_s)
        assert "Redis at stream.example:7000/2 could not lease within" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is error
        assert 1 <= flaky.num_calls < 10


def test_pauses_double_up_to_a_limit_and_differ(client: redis.Redis) -> None:
    def pauses() -> list[float]:
        pause_after = pacing(client, "answer", give_up_after_s=1000.0)
        return [pause_after(PASSING[0]) for _ in range(12)]

    first, second = pauses(), pauses()
    assert first != second
    bounds = [min(0.05 * 2**n, 1.0) for n in range(12)]
    for pause, bound in zip(first, bounds, strict=True):
        assert 0.5 * bound <= pause <= bound


def test_a_block_stays_below_the_reply_timeout(client: redis.Redis) -> None:
    assert bounded_block_ms(client, 60_000) == 2000
    assert bounded_block_ms(client, 500) == 500
    assert bounded_block_ms(client, 0) == 1  # 0 would mean for ever
    with redis.Redis(socket_timeout=None) as patient:
        assert bounded_block_ms(patient, 60_000) == 5000


def test_a_server_is_named_without_secrets(client: redis.Redis) -> None:
    assert server_name(client) == "stream.example:7000/2"
    with redis.Redis(unix_socket_path="/run/x.sock", password="secret") as local:
        assert server_name(local) == "unix:///run/x.sock"
