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
import redis

from streamrl.errors import ResourceError
from streamrl.monitor.opening import URL_VARIABLE, Target, find_target
from streamrl.telemetry.progress import Report
from streamrl.transport.address import server_name
from streamrl.transport.connection import connect
from streamrl.transport.keys import Keys
from streamrl.transport.snapshot import snapshot
from streamrl.transport.types import RunInfo

if TYPE_CHECKING:
    from streamrl.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    client: redis.Redis
    keys: Keys
    info: RunInfo
    reports: tuple[Report, ...]  # of its parts

    @property
    def config(self) -> Config:
        from streamrl.config.dump import config_from_json

        return config_from_json(self.info.config_json)


def takes_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """[RUN_FOLDER] --redis URL --run NAME: the command is called with `folder`, `url` and `run`."""
    folder = click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[RUN_FOLDER]")
    return folder(takes_server(command))


def takes_server(command: Callable[..., Any]) -> Callable[..., Any]:
    url = click.option(
        "--redis", "url", metavar="URL", help=f"The run's Redis; by default the folder's, or {URL_VARIABLE}."
    )
    return url(click.option("--run", metavar="NAME", help="The run's name; by default the folder's.")(command))


def takes_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same: the command is called with `target`."""

    @takes_place
    @functools.wraps(command)
    def with_target(folder: Path | None, url: str | None, run: str | None, **rest: Any) -> Any:
        return command(target=find_target(folder, url, run), **rest)

    return with_target


@contextmanager
def open_run(target: Target) -> Iterator[OpenRun]:
    """With the patience of a part, for who changes the run or reads much of it; `monitor.opening.opened` is for a look.
    ResourceError when the server does not answer, or knows nothing of the run."""
    from streamrl.config import schema  # with pydantic, which who only looks starts faster without

    with connect(target.server(), schema.Redis()) as client:
        keys = Keys(target.run)
        seen = snapshot(client, keys)
        if seen.run is None:
            raise ResourceError(f"Redis at {server_name(client)} holds no run {target.run!r}")
        yield OpenRun(client=client, keys=keys, info=seen.run, reports=seen.reports)


def operator() -> str:
    """Who speaks, for the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
