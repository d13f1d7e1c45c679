"""Which run a command is about: a run's folder, or a server and a name.

streamrl pause runs/big                              the folder's configuration says where its Redis is
streamrl pause --redis redis://host:6379 --run big   from anywhere; STREAMRL_REDIS stands in for --redis
"""

from __future__ import annotations

import functools
import getpass
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamrl.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    import redis

    from streamrl.transport.keys import Keys
    from streamrl.transport.types import RunInfo

_VARIABLE = "STREAMRL_REDIS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    client: redis.Redis
    keys: Keys
    info: RunInfo


def takes_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """[RUN_FOLDER] --redis URL --run NAME: the command is called with `target`."""

    @click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[RUN_FOLDER]")
    @click.option("--redis", "url", metavar="URL", help=f"The run's Redis; by default the folder's, or {_VARIABLE}.")
    @click.option("--run", metavar="NAME", help="The run's name; by default the folder's.")
    @functools.wraps(command)
    def with_target(folder: Path | None, url: str | None, run: str | None, **rest: Any) -> Any:
        return command(target=find_run(folder, url, run), **rest)

    return with_target


def find_run(folder: Path | None, url: str | None, run: str | None) -> Target:
    if folder is None:
        url = url or os.environ.get(_VARIABLE)
        if url is None or run is None:
            raise ConfigError(f"give the folder of a run, or --redis URL (or {_VARIABLE}) and --run NAME")
        return Target(url=url, run=run)
    from streamrl.config.load import load_config

    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: there is no config.yaml in it")
    config = load_config(path, ()).config
    return Target(url=url or _server_of(folder, config.redis.url), run=run or config.name)


@contextmanager
def open_run(target: Target) -> Iterator[OpenRun]:
    """ResourceError when the server does not answer, or knows nothing of the run."""
    from streamrl.config import schema
    from streamrl.transport.address import server_name
    from streamrl.transport.connection import connect
    from streamrl.transport.keys import Keys
    from streamrl.transport.snapshot import snapshot

    with connect(target.url, schema.Redis()) as client:
        keys = Keys(target.run)
        info = snapshot(client, keys).run
        if info is None:
            raise ResourceError(f"Redis at {server_name(client)} holds no run {target.run!r}")
        yield OpenRun(client=client, keys=keys, info=info)


def operator() -> str:
    """Who speaks, for the journal."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _server_of(folder: Path, url: str) -> str:
    from streamrl.config.check import EMBEDDED_REDIS
    from streamrl.transport.embedded import serving

    if url != EMBEDDED_REDIS:
        return url
    found = serving(folder / "redis")
    if found is None:
        raise ResourceError(f"the run in {folder} is not up: its Redis does not run. `streamrl up` starts it")
    return found
