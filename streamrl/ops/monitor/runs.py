"""Which run is meant, and the way to it, as quickly as can be: without the schema of configurations.

Blocks at most some seconds for the server to answer, then ResourceError.

All runs in a Redis. The keys are gone through by SCAN, a page at a time, and for a bounded time only.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from streamrl.errors import ConfigError, ResourceError, TransportError
from streamrl.protocol.transport.address import server_name
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot

URL_VARIABLE = "STREAMRL_REDIS"
_EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run by its server and name."""

    url: str | None  # None: its folder says that Redis is embedded, and that does not run
    run: str
    folder: Path | None = None

    def server(self) -> str:
        """The URL; ResourceError when nothing serves it."""
        if self.url is None:
            raise ResourceError(f"the run in {self.folder} is not up: its Redis does not run; `streamrl up` starts it")
        return self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeouts:
    connect_timeout_s: float = 1.5  # a person waits for the answer
    reply_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    client: redis.Redis
    keys: Keys
    server: str


def find_target(folder: Path | None, url: str | None, run: str | None) -> Target:
    """From what a command line says: a run's folder, or a server and a name."""
    if folder is None:
        url = url or os.environ.get(URL_VARIABLE)
        if url is None or run is None:
            raise ConfigError(f"give the folder of a run, or --redis URL (or {URL_VARIABLE}) and --run NAME")
        return Target(url=url, run=run)
    name, server = _read_config(folder)
    return Target(url=url or _serving(folder, server), run=run or name, folder=folder)


@contextmanager
def opened(target: Target) -> Iterator[Opened]:
    with open_server(target.server()) as client:
        yield Opened(client=client, keys=Keys(target.run), server=server_name(client))


@contextmanager
def open_server(url: str) -> Iterator[redis.Redis]:
    """What the server refuses, or leaves unanswered, of what its user asks inside is a TransportError."""
    with connect(url, _Timeouts()) as client:
        try:
            yield client
        except redis.RedisError as error:
            raise TransportError(f"Redis at {server_name(client)}: {error}") from error


def _read_config(folder: Path) -> tuple[str, str]:
    """(the run's name, its redis.url), of the configuration that the run wrote, which is complete."""
    import yaml

    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: there is no config.yaml in it")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return str(config["name"]), str(config["redis"]["url"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ConfigError(f"{path} is not the configuration of a run: it is no YAML") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path} is not the configuration of a run: `name` or `redis.url` is missing") from None


def _serving(folder: Path, url: str) -> str | None:
    if url != _EMBEDDED:
        return url
    from streamrl.protocol.transport.embedded import serving

    return serving(folder / "redis")


_KEYS_A_PAGE = 2_000
_META = re.compile(r"^streamrl:\{(.+)\}:meta$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    name: str
    state: str
    is_live: bool  # a learner holds it
    term: int
    step: int
    parts: int  # that have reported
    created_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    runs: tuple[ListedRun, ...]  # the youngest first
    is_complete: bool  # False: time was up before all keys had been seen


def list_runs(client: redis.Redis, *, within_s: float = 10.0) -> Listing:
    deadline = time.monotonic() + within_s
    names: set[str] = set()
    cursor = 0
    while True:
        reply: Any = client.scan(cursor, match="streamrl:{*}:meta", count=_KEYS_A_PAGE, _type="hash")
        cursor, page = reply
        found = (_META.match(key.decode(errors="replace")) for key in page)
        names.update(match[1] for match in found if match)
        if cursor == 0 or time.monotonic() > deadline:
            break
    runs = sorted((_read(client, name) for name in names), key=lambda run: (-(run.created_at or 0.0), run.name))
    return Listing(runs=tuple(runs), is_complete=cursor == 0)


def _read(client: redis.Redis, name: str) -> ListedRun:
    seen = snapshot(client, Keys(name))
    return ListedRun(
        name=name,
        state=seen.run.state if seen.run else "unknown",
        is_live=seen.holder is not None,
        term=seen.run.term if seen.run else 0,
        step=seen.step,
        parts=len(seen.reports),
        created_at=seen.created_at,
    )
