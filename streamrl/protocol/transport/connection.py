"""Connections to Redis, and retries of calls.

Clients have no retries of their own: a library that repeats a write whose reply was lost writes twice, silently. Here
the caller states what is safe to repeat, through `repeat`; retries have backoff, jitter and a deadline. Blocks at most
`give_up_after_s`, then raises TransportError with the server's name (never its password).
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeVar

import redis
import redis.asyncio
from redis._parsers import Encoder
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from streamrl.errors import ResourceError, ServerFull, TransportError
from streamrl.protocol.transport.address import PASSWORD
from streamrl.protocol.transport.clients import AnyClient, open_async_client, open_client, server_name

T = TypeVar("T")

OLDEST_SERVER = (6, 2)
_LONGEST_BLOCK_MS = 5_000
_UNIX_SEND_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_ROLES = "is this the user of another role? `streamrl redis acl` prints each role's permissions"
# When hiredis parses the replies, redis-py lets it pack the commands too, and it copies large values into one buffer,
# several times over. This packer passes bodies and weights to the socket without a copy.
_LARGE_BYTES = 6000
_ENCODER = Encoder("utf-8", "strict", decode_responses=False)  # type: ignore[no-untyped-call]
_PACKER = PythonRespSerializer(_LARGE_BYTES, _ENCODER.encode)
_TLS_MISTAKES = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
_FULL_ANSWERS = ("OOM", "MISCONF")  # memory or disk; the failed call has written nothing
# Errors of a server that is starting, full, busy or changing its role: the same call may soon succeed. The library
# strips the code from errors that it knows, but not from a script's.
_PASSING_ERRORS = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # and MASTERDOWN
    redis.exceptions.TryAgainError,
)
_PASSING_ANSWERS = (*_FULL_ANSWERS, "LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED", "BUSY")


class Timeouts(Protocol):
    """The part of the setting `redis` that is used here, so that monitors need not load the whole schema."""

    @property
    def connect_timeout_s(self) -> float: ...

    @property
    def reply_timeout_s(self) -> float: ...


def connect(
    url: str,
    settings: Timeouts,
    *,
    patience_s: float | None = None,
    on_trouble: Callable[[str], None] = lambda why: None,
) -> redis.Redis:
    """Return a client whose server has answered.

    Without `patience_s`, ResourceError if no server answers within `connect_timeout_s`: the user must fix something.
    With `patience_s` the server was up before, or is starting: retry for that long, then raise TransportError; an error
    that waiting cannot change is raised at once. `on_trouble` is called with each failed attempt.
    """
    client = open_client(url, retry=Retry(NoBackoff(), 0), command_packer=_PACKER, **_options(url, settings))
    server = server_name(client)

    def note(error: redis.RedisError) -> None:
        if patience_s is not None and not _is_away(error):
            raise TransportError(f"Redis at {server} could not answer: {error}") from error
        on_trouble(f"Redis at {server} does not answer: {str(error).rstrip('.')}. {_remedy(url, error)}")

    give_up_after_s = settings.connect_timeout_s if patience_s is None else patience_s
    try:
        repeat(client, "answer", client.ping, give_up_after_s=give_up_after_s, on_trouble=note)
    except TransportError as error:
        client.close()
        kind = TransportError if patience_s is not None and _is_away(error.__cause__) else ResourceError
        raise kind(f"{str(error).rstrip('.')}. {_remedy(url, error.__cause__)}") from None
    except BaseException:
        client.close()
        raise
    return client


def connect_async(url: str, settings: Timeouts) -> redis.asyncio.Redis:
    """Return a client that connects with its first call."""
    options = _options(url, settings)
    if url.startswith("unix:"):
        options["redis_connect_func"] = _connect_with_room
    return open_async_client(url, retry=AsyncRetry(NoBackoff(), 0), **options)


async def _connect_with_room(connection: Any) -> None:
    """Enlarge the Unix socket's send buffer to take a whole delivery, as far as the system allows.

    asyncio copies and keeps what the socket does not take at once, and sends it in pieces as the server reads. That was
    a sixth of a worker's cost per group.
    """
    await connection.on_connect()
    connection._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)


def _options(url: str, settings: Timeouts) -> dict[str, Any]:
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": settings.reply_timeout_s,
        "socket_connect_timeout": settings.connect_timeout_s,
    }
    return options if url.startswith("unix:") else {**options, "socket_keepalive": True}


def _is_away(error: BaseException | None) -> bool:
    is_mistake = any(text in str(error) for text in _TLS_MISTAKES)
    return isinstance(error, redis.RedisError) and _is_passing(error) and not is_mistake


def _remedy(url: str, error: BaseException | None) -> str:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        form, without = "redis://USER@HOST", "the password is that of the default user"
        if url.startswith("unix:"):
            form, without = "unix://USER@/PATH, or unix://default@/PATH if it has no users", "no password is sent"
        return (
            f"Put the user into the URL ({form}), and set {PASSWORD}_FILE to the file with its password; "
            f"without a user in the URL, {without}"
        )
    if isinstance(error, redis.exceptions.NoPermissionError):
        return "Give the user the rules that `streamrl redis acl` prints for its role"
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "Set the CA that signed the server's certificate: rediss://HOST:PORT?ssl_ca_certs=FILE"
    may_differ_in_tls = (
        isinstance(error, redis.TimeoutError) if url.startswith("rediss") else "closed by server" in text
    )
    if "SSL" in text or may_differ_in_tls:
        return "Start Redis there, or check TLS, which only one side may be using: rediss:// has TLS, redis:// has none"
    if "sentinel" in url.partition("://")[0]:
        return "Its sentinels must run and know the service by that name (SENTINEL GET-MASTER-ADDR-BY-NAME)"
    return "Start Redis there, or set another server by --redis or redis.url (`embedded` needs none)"


def bounded_block_ms(client: AnyClient, wanted_ms: int) -> int:
    """Return how long a command may block: well below the reply timeout, or silence would look like a lost link."""
    timeout_s = client.get_connection_kwargs().get("socket_timeout")
    longest = _LONGEST_BLOCK_MS if timeout_s is None else min(_LONGEST_BLOCK_MS, int(timeout_s * 500))
    return max(1, min(wanted_ms, longest))


def check_server(
    client: redis.Redis, *, max_backlog_bytes: int = 0, max_store_bytes: int = 0, give_up_after_s: float = 0.0
) -> None:
    """Raise ResourceError if the server is too old, would evict a run's keys, or lacks memory for the settings."""
    info = repeat(client, "read the server's info", client.info, give_up_after_s=give_up_after_s)
    for fault in server_faults(server_name(client), info, max_backlog_bytes, max_store_bytes).values():
        raise ResourceError(fault)


def server_faults(
    server: str, info: Mapping[str, Any], max_backlog_bytes: int = 0, max_store_bytes: int = 0
) -> dict[str, str]:
    """Return the faults that exclude any run, by version, policy and memory, each with its remedy."""
    faults = {}
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        faults["version"] = f"Redis at {server} is version {version}; streamrl needs 6.2 or newer"
    limit, policy = info.get("maxmemory", 0), info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and limit:
        faults["policy"] = (
            f"Redis at {server} has maxmemory-policy {policy}: it would evict rollouts; "
            "set it to noeviction (redis-cli CONFIG SET maxmemory-policy noeviction, or a managed service's parameters)"
        )
    needed = needed_memory(max_backlog_bytes, max_store_bytes)
    if limit and needed > limit:
        weights = f" and weights.max_store_bytes = {max_store_bytes}" if max_store_bytes else ""
        faults["memory"] = (
            f"redis.max_backlog_bytes = {max_backlog_bytes}{weights}: Redis at {server} may use {limit} bytes "
            f"(maxmemory), and needs {needed}, a quarter more than the data; lower the settings, or raise maxmemory"
        )
    return faults


def needed_memory(max_backlog_bytes: int, max_store_bytes: int = 0) -> int:
    """Return the server memory needed to hold this many bytes of groups and of weights."""
    return (max_backlog_bytes + max_store_bytes) * 5 // 4


class Patience(TypedDict, total=False):
    """How long `repeat` retries, and whether it also waits for room on a full server."""

    give_up_after_s: float
    wait_for_room: bool


def pacing(
    client: AnyClient, what: str, *, give_up_after_s: float, wait_for_room: bool = True
) -> Callable[[redis.RedisError], float]:
    """Return the backoff of one call: from an error to the seconds until the next try, or TransportError to give up."""
    server, longest_s = server_name(client), _FIRST_PAUSE_S
    deadline = time.monotonic() + give_up_after_s

    def pause_after(error: redis.RedisError) -> float:
        nonlocal longest_s
        if not _is_passing(error):
            hint = f" ({_ROLES})" if isinstance(error, redis.exceptions.NoPermissionError) else ""
            raise TransportError(f"Redis at {server} could not {what}: {error}{hint}") from error
        if not wait_for_room and _is_full(error):
            raise ServerFull(f"Redis at {server} could not {what} because it is full: {error}") from error
        pause_s = longest_s * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s > deadline:
            raise TransportError(f"Redis at {server} could not {what} within {give_up_after_s:g} s: {error}") from error
        longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)
        return pause_s

    return pause_after


def _is_passing(error: redis.RedisError) -> bool:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    return isinstance(error, _PASSING_ERRORS) or _is_full(error) or _has_code(error, _PASSING_ANSWERS)


def _is_full(error: redis.RedisError) -> bool:
    full = isinstance(error, redis.exceptions.OutOfMemoryError)
    return full or _has_code(error, _FULL_ANSWERS)


def _is_of_replica(error: redis.RedisError) -> bool:
    """Whether a primary has become a replica. It keeps its connections, while its name may already lead to another
    server: only a new connection finds that."""
    return isinstance(error, redis.ReadOnlyError) or _has_code(error, ("READONLY",))


def _has_code(error: redis.RedisError, answers: Sequence[str]) -> bool:
    """Whether a word of the error is one of these codes; names of users and runs may contain them as parts."""
    words = (word.lstrip("-") for word in str(error).split())
    return any(word in answers for word in words)


def repeat(
    client: redis.Redis,
    what: str,
    call: Callable[[], T],
    *,
    give_up_after_s: float = 0.0,
    wait_for_room: bool = True,
    on_trouble: Callable[[redis.RedisError], None] = lambda error: None,
) -> T:
    """Retry the call until it succeeds. Only for calls that are safe to repeat when the first reply was lost."""
    pause_after = pacing(client, what, give_up_after_s=give_up_after_s, wait_for_room=wait_for_room)
    while True:
        try:
            return call()
        except redis.RedisError as error:
            pause_s = pause_after(error)
            on_trouble(error)
            if _is_of_replica(error):
                client.connection_pool.disconnect(inuse_connections=False)
        time.sleep(pause_s)


async def repeat_async(
    client: redis.asyncio.Redis, what: str, call: Callable[[], Awaitable[T]], *, give_up_after_s: float = 0.0
) -> T:
    """`repeat` for coroutines."""
    pause_after = pacing(client, what, give_up_after_s=give_up_after_s)
    while True:
        try:
            return await call()
        except redis.RedisError as error:
            pause_s = pause_after(error)
            if _is_of_replica(error):
                await client.connection_pool.disconnect(inuse_connections=False)
        await asyncio.sleep(pause_s)


def in_one_trip(client: redis.Redis, fill: Callable[[Pipeline], object]) -> list[Any]:
    """Run read-only commands in a pipeline. Not in a transaction, which a full Redis refuses."""
    with client.pipeline(transaction=False) as pipe:
        fill(pipe)
        return pipe.execute()
