"""Redis clients for an address: a URL, and a password that need not be part of it.

`address` defines the URL's forms. The password comes from the environment: STREAMRL_REDIS_PASSWORD_FILE names a file
that holds it, or STREAMRL_REDIS_PASSWORD holds it. A password in the URL is used too, but a configuration may not
contain one. Blocks on nothing: clients connect with their first call. The file is read again for each connection, so
that the password can change during a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.connection import parse_url
from redis.sentinel import SentinelConnectionPool

from streamrl.errors import ConfigError
from streamrl.protocol.transport.address import (
    FORMS,
    GIVEN_BY,
    PASSWORD,
    SENTINEL_PASSWORD,
    has_password_in_query,
    masked,
    split_password,
)
from streamrl.protocol.transport.secret_files import AsyncSslConnection, PasswordFile, read_passwords
from streamrl.protocol.transport.sentinels import (
    AsyncMasterConnection,
    AsyncMasterSslConnection,
    MasterConnection,
    MasterSslConnection,
    of_sentinels,
)

AnyClient = redis.Redis | redis.asyncio.Redis

_SENTINEL_PORT = 26379
_DATABASE = re.compile(r"/?\d*")
_SERVICE = re.compile(r"/([A-Za-z0-9._-]+)(?:/(\d+))?/?")


class _SentinelClient(redis.Redis):
    """Closes the connections to its sentinels too."""

    def close(self) -> None:
        super().close()
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.close()


class _AsyncSentinelClient(redis.asyncio.Redis):
    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def open_client(url: str, *, environment: Mapping[str, str] = os.environ, **options: Any) -> redis.Redis:
    """Open a client; ConfigError when the URL is invalid, or the password's file cannot be read."""
    if not _by_sentinel(url):
        options |= _secret(_checked(url), environment)
        return redis.Redis.from_url(_of_library(url, options), **options)
    options |= _secret(url, environment)
    client: redis.Redis = _watched(
        url,
        environment,
        options,
        by=redis.sentinel.Sentinel,
        redis_class=_SentinelClient,
        connection_class=MasterSslConnection if _with_tls(url) else MasterConnection,
    )
    return client


def open_async_client(url: str, *, environment: Mapping[str, str] = os.environ, **options: Any) -> redis.asyncio.Redis:
    if not _by_sentinel(url):
        options |= _secret(_checked(url), environment)
        found: redis.asyncio.Redis = redis.asyncio.Redis.from_url(_of_library(url, options), **options)
        if _with_tls(url):
            found.connection_pool.connection_class = AsyncSslConnection  # the URL overrides this as an option
        return found
    options |= _secret(url, environment)
    client: redis.asyncio.Redis = _watched(
        url,
        environment,
        options,
        by=redis.asyncio.sentinel.Sentinel,
        redis_class=_AsyncSentinelClient,
        connection_class=AsyncMasterSslConnection if _with_tls(url) else AsyncMasterConnection,
    )
    return client


def server_name(client: AnyClient) -> str:
    """Return the server's name for messages, without secrets."""
    pool, options = client.connection_pool, client.get_connection_kwargs()
    if isinstance(pool, SentinelConnectionPool | AsyncSentinelConnectionPool):
        return f"service {pool.service_name} of its sentinels"
    if "path" in options:
        return f"unix://{options['path']}"
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db', 0)}"


def _checked(url: str) -> str:
    if has_password_in_query(url):
        remedy = f"a password in the query would be visible to all; set {PASSWORD}_FILE to a file that holds it"
        raise ConfigError(f"{GIVEN_BY}: {masked(url)!r}: {remedy}")
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
        # The client's own parser reads any other path as database 0.
        if not url.startswith("unix:") and not _DATABASE.fullmatch(urlsplit(url).path):
            raise ValueError("its path is not a database number")
    except ValueError:
        raise _not_an_address(url) from None
    return url


def _not_an_address(url: str) -> ConfigError:
    # Remove anything that may be a password, wherever the URL is wrong.
    shown = re.sub("//.*@", "//", url.partition("?")[0])
    return ConfigError(f"{GIVEN_BY}: {shown!r} is not a server address; must be {FORMS}")


def _by_sentinel(url: str) -> bool:
    return url.partition("://")[0].endswith("+sentinel")


def _with_tls(url: str) -> bool:
    return url.startswith("rediss")


def _secret(url: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return options for the password; none for a Unix socket without a user: the embedded server has no password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # an unclosed bracket
        raise _not_an_address(url) from None
    if (parts.scheme == "unix" and "@" not in parts.netloc) or split_password(url)[1] is not None:
        return {}
    if file := environment.get(f"{PASSWORD}_FILE"):
        user = parts.username
        provider = PasswordFile(user and unquote(user), Path(file), key=f"{PASSWORD}_FILE = {file!r}")
        return {"credential_provider": provider}
    password = _from_environment(PASSWORD, environment)
    return {} if password is None else {"password": password}


def _of_library(url: str, options: Mapping[str, Any]) -> str:
    """Remove the user if the credential provider supplies it."""
    if "credential_provider" not in options:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _from_environment(name: str, environment: Mapping[str, str]) -> str | None:
    file = environment.get(f"{name}_FILE")
    if not file:
        return environment.get(name) or None
    return read_passwords(Path(file), key=f"{name}_FILE = {file!r}")[0]


def _watched(
    url: str, environment: Mapping[str, str], options: Mapping[str, Any], *, by: Any, **classes: type[Any]
) -> Any:
    """Create a client of the server that sentinels know under a service name."""
    parts = urlsplit(url)
    userinfo, at, hosts = parts.netloc.rpartition("@")
    service = _SERVICE.fullmatch(parts.path)
    if service is None or not hosts:
        raise ConfigError(f"{GIVEN_BY}: {masked(url)!r} has no service name; must be {FORMS}")
    scheme = parts.scheme.removesuffix("+sentinel")
    # Parse user, database and TLS as in any other URL.
    plain = urlunsplit((scheme, f"{userinfo}{at}{hosts.partition(',')[0]}", f"/{service[2] or 0}", parts.query, ""))
    found: dict[str, Any] = dict(parse_url(_checked(plain)))  # type: ignore[no-untyped-call]
    given = ("username",) if "credential_provider" in options else ()
    for name in ("host", "port", "connection_class", *given):
        found.pop(name, None)
    tls = {"ssl": True} if scheme == "rediss" else {}
    tls |= {name: value for name, value in found.items() if name.startswith("ssl_")}
    password = _from_environment(SENTINEL_PASSWORD, environment)
    masters = (
        "password",
        "credential_provider",
        "command_packer",
    )  # not for sentinels: they have other users, and get short commands
    shared = {name: value for name, value in options.items() if name not in masters}
    sentinel_options = of_sentinels({**shared, **tls, **({"password": password} if password else {})})
    sentinels = by([_host(text, url) for text in hosts.split(",")], sentinel_kwargs=sentinel_options)
    return sentinels.master_for(service[1], **{**options, **found, **tls, **classes})


def _host(text: str, url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None:
        raise ConfigError(f"{GIVEN_BY}: {masked(url)!r}: {text!r} is not a sentinel's HOST:PORT")
    return host, port or _SENTINEL_PORT
