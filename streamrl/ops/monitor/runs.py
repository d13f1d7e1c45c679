"""Finds a run and connects to it, quickly: without the configuration schema. Lists all runs in a Redis.

Blocks at most some seconds on the server, then ResourceError; unless the run's folder is known and shows that it has
ended, and how.

To list runs, keys are scanned page by page (SCAN), for a bounded time.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from streamrl.errors import ConfigError, ResourceError, TransportError
from streamrl.ops.monitor.remains import Remains, read_config, read_remains
from streamrl.protocol.transport.address import URL_VARIABLE
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot

_EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run's server and name."""

    url: str | None  # None: the folder names an embedded Redis, which is not running
    run: str
    folder: Path | None = None

    def server(self) -> str:
        """Return the URL; ResourceError if there is none."""
        if self.url is not None:
            return self.url
        remains = self.remains()
        # A learner that may live has a server; `up` here would take the run from it.
        advice = "" if remains is not None and remains.state == "running" else "; `streamrl up` starts it"
        raise ResourceError(f"the embedded Redis of the run in {self.folder} is not running here{advice}")

    def remains(self) -> Remains | None:
        """Return what the folder records; None if there is none, or it is another run's."""
        found = read_remains(self.folder) if self.folder is not None else None
        return found if found is not None and found.name == self.run else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeouts:
    connect_timeout_s: float = 1.5  # a person waits for the answer
    reply_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    client: redis.Redis
    keys: Keys
    server: str
    folder: Path | None = None

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def where(self) -> str:
        return self.server


def find_target(folder: Path | None, url: str | None, run: str | None) -> Target:
    """Find the run named on a command line: by its folder, or by server and name."""
    if folder is None:
        url = url or url_of_environment()
        if url is not None and run is None:
            raise ConfigError("name the run in that Redis with --run NAME; `streamrl runs ls --redis URL` lists them")
        if url is None or run is None:
            raise ConfigError(f"give the folder of a run, or --redis URL (or {URL_VARIABLE}) and --run NAME")
        return Target(url=url, run=run)
    config = read_config(folder)
    url = url or _serving(folder, str(config["redis"]["url"]))
    return Target(url=url, run=run or str(config["name"]), folder=folder)


def url_of_environment() -> str | None:
    """Return what stands in for --redis. An empty variable is none, as compose files set it."""
    return os.environ.get(URL_VARIABLE) or None


@contextmanager
def opened(target: Target, *, caller_retries: bool = False) -> Iterator[Opened | Remains]:
    """Open the run in its Redis, or its folder if Redis is gone. With `caller_retries`, an unreachable Redis is a
    TransportError, for callers that retry."""
    with ExitStack() as stack:
        try:
            client = stack.enter_context(open_server(target.server(), caller_retries=caller_retries))
            source: Opened | Remains = _look_in(client, target)
        except (ResourceError, TransportError) as error:
            source = remains_or_raise(target, error)
        yield source


def _look_in(client: redis.Redis, target: Target) -> Opened | Remains:
    """Look for the run; a server without a run that has ended was emptied, or is another one: use the folder."""
    keys = Keys(target.run)
    if target.folder is not None and not client.exists(keys.meta):
        remains = target.remains()
        if remains is not None and remains.has_ended:
            return remains
    return Opened(client=client, keys=keys, server=server_name(client), folder=target.folder)


def remains_or_raise(target: Target, error: ResourceError | TransportError) -> Remains:
    """Return the folder's record of a run whose Redis does not answer; raise the error if it may be running."""
    remains = target.remains()
    if remains is None:
        raise error
    if remains.state == "running" or (remains.state == "absent" and target.url is not None):
        raise type(error)(f"{error}; the run in {remains.folder} {remains.description}") from None
    return remains


@contextmanager
def open_server(url: str, *, caller_retries: bool = False) -> Iterator[redis.Redis]:
    """Connect; a refused or unanswered command inside the context is a TransportError."""
    times = _Timeouts()
    with connect(url, times, patience_s=times.connect_timeout_s if caller_retries else None) as client:
        try:
            yield client
        except redis.RedisError as error:
            raise TransportError(f"Redis at {server_name(client)}: {error}") from error


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
    is_live: bool  # a learner holds its lease
    term: int
    step: int
    parts: int  # with reports
    created_at: float | None
    ended_at: float | None = None
    folder: str | None = None
    uid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    runs: tuple[ListedRun, ...]  # newest first
    is_complete: bool  # False: the time ran out before all keys were scanned


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
    runs = sorted((_read(client, name) for name in names), key=_newest_first)
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
        uid=seen.run.uid if seen.run else None,
    )


def with_folders(listing: Listing, folder: Path) -> Listing:
    """Add the runs whose folders are there, if the place exists."""
    found = {(run.uid, run.name): run for run in listing.runs}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (run := _read_folder(path)) is not None:
            key = (run.uid or run.folder, run.name)
            found[key] = _joined(found[key], run) if key in found else run
    runs = sorted(found.values(), key=_newest_first)
    return replace(listing, runs=tuple(runs))


def _newest_first(run: ListedRun) -> tuple[float, str]:
    return -(run.created_at or 0.0), run.name


def _joined(live: ListedRun, recorded: ListedRun) -> ListedRun:
    """Combine both: Redis may lack steps since the last checkpoint, and does not know that its learner has died."""
    died = live.state == "running" and not live.is_live and recorded.state == "crashed"
    state = recorded.state if died else live.state
    return replace(live, state=state, step=max(live.step, recorded.step), folder=recorded.folder)


def _read_folder(folder: Path) -> ListedRun | None:
    """Read a run's folder; None if it is none, or somebody else's that may not be read. A run whose embedded Redis is
    running is asked there."""
    try:
        target = find_target(folder, None, None)
        remains = read_remains(folder)
        recorded = _listed(remains)
    except (ConfigError, OSError):
        return None
    if remains.url == _EMBEDDED and target.url is not None:
        with suppress(ResourceError, TransportError), open_server(target.url) as client:
            return _joined(_read(client, target.run), recorded)
    return recorded


def _listed(remains: Remains) -> ListedRun:
    return ListedRun(
        name=remains.name,
        state=remains.state,
        is_live=False,
        term=remains.term,
        step=remains.step,
        parts=0,
        created_at=remains.began_at or None,
        ended_at=remains.at if remains.has_ended else None,
        folder=str(remains.folder),
        uid=remains.uid,
    )
