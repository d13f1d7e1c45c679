"""Shared by several commands: their arguments, how to find the run, and how to print results.

A command finds its run by the run's folder, or by a server and a name:

streamrl pause runs/big                              the folder's configuration names its Redis
streamrl pause --redis redis://host:6379 --run big   from anywhere; STREAMRL_REDIS stands in for --redis
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import redis
from click.core import ParameterSource

from streamrl.errors import ConfigError, ResourceError, TransportError
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.runs import Target, find_target, remains_or_raise
from streamrl.protocol.transport.address import URL_VARIABLE
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import RunInfo
from streamrl.telemetry.progress import Report
from streamrl.terminal import can_redraw, printable

if TYPE_CHECKING:
    from streamrl.config.load import Loaded
    from streamrl.config.schema import Config

# These pass `overrides`, `as_json` and `timeout_s` to the command.
takes_overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
takes_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add FILE [KEY.SUB=VALUE]..., passed as `file` and `overrides`, for `load_config`."""
    return click.argument("file", type=click.Path())(takes_overrides(command))


def takes_timeout(purpose: str) -> Callable[..., Any]:
    return click.option("--timeout-s", type=click.FloatRange(min=0), default=30.0, help=f"How long to {purpose}.")


def print_result(data: Any, lines: Iterable[str], *, as_json: bool, indent: int | None = 2) -> None:
    """Print the data as JSON, or the lines for people, with control characters from other machines escaped."""
    for line in [json.dumps(data, indent=indent)] if as_json else map(printable, lines):
        click.echo(line)


def refuse(*names: str, because: str) -> None:
    """Raise ConfigError if these parameters of the command are on its command line, where they would be ignored."""
    context = click.get_current_context()
    given = [
        max(one.opts, key=len)
        for one in context.command.params
        if one.name in names and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise ConfigError(f"{' and '.join(given)}: {because}")


class MovingLine:
    """A line on stderr that is overwritten repeatedly; prints nothing if stderr is not a terminal that can do so."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._is_shown = False

    def show(self, text: str) -> None:
        from rich.text import Text

        if can_redraw(self._console):
            self._is_shown = True
            line = Text(printable(text))
            line.truncate(self._console.width - 1, overflow="ellipsis")  # a wrapped line cannot be overwritten
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)

    def end(self) -> None:
        if self._is_shown:
            click.echo(err=True)
            self._is_shown = False


def run_trials(loaded: Loaded, *, workers_are_here: bool = True, hosts: range | None = None) -> None:
    """Run the trials: UserError for anything that would fail in the run; doubts are printed to stderr. `hosts`: numbers
    of hosts that the learner may have; None: not known."""
    from streamrl.ops.monitor.doctor import trials

    line = MovingLine()
    try:
        trials.run_trials(
            loaded,
            report=line.show,
            warn=lambda text: click.echo(f"warning: {printable(text)}", err=True),
            workers_are_here=workers_are_here,
            hosts=hosts,
        )
    finally:
        line.end()


class OutputFile(click.Path):
    """An output file, as a Path; checked before the work whose result it will hold."""

    def __init__(self, *, suffix: str = "") -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffix = suffix

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if not path.name.endswith(self._suffix):
            self.fail(f"{str(path)!r} must end in {self._suffix}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {str(path.parent)!r}", param, ctx)
        super().convert(value, param, ctx)
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    client: redis.Redis
    keys: Keys
    info: RunInfo
    step: int
    reports: tuple[Report, ...]  # of its processes

    @property
    def config(self) -> Config:
        from streamrl.config.load import config_from_json

        return config_from_json(self.info.config_json)


def takes_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add [RUN_FOLDER] --redis URL --run NAME, passed as `folder`, `url` and `run`."""
    folder = click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[RUN_FOLDER]")
    return folder(takes_server(command))


def takes_server(command: Callable[..., Any]) -> Callable[..., Any]:
    url = click.option(
        "--redis", "url", metavar="URL", help=f"The run's Redis; default: the folder's, or {URL_VARIABLE}."
    )
    return url(click.option("--run", metavar="NAME", help="The run's name; default: the folder's.")(command))


def takes_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same arguments, passed as one `target`."""

    @takes_place
    @functools.wraps(command)
    def with_target(folder: Path | None, url: str | None, run: str | None, **rest: Any) -> Any:
        return command(target=find_target(folder, url, run), **rest)

    return with_target


@contextmanager
def open_run(target: Target, *, remedy: str) -> Iterator[OpenRun]:
    """Open the run with full retries, for commands that change the run or read much of it; else use
    `monitor.runs.opened`.

    ResourceError when the server does not answer, or has no such run; for a run that has ended and whose Redis is gone,
    the error ends with `remedy`, in which {folder} is the run's folder and {up} the command that resumes it.
    """
    with open_run_or_remains(target) as opened:
        if isinstance(opened, Remains):
            raise redis_gone_error(opened, remedy=remedy)
        yield opened


def redis_gone_error(remains: Remains, *, remedy: str) -> ResourceError:
    """Return the error that the run's Redis is gone, and what to do."""
    if not remains.has_ended:
        return ResourceError(
            f"run {remains.name!r} {remains.description}; `streamrl up {remains.folder}/config.yaml` starts it"
        )
    remedy = remedy.format(folder=remains.folder, up=remains.up)
    return ResourceError(f"run {remains.name!r} {remains.description}, and its Redis is gone: {remedy}")


@contextmanager
def open_run_or_remains(target: Target) -> Iterator[OpenRun | Remains]:
    from streamrl.config import schema  # imports pydantic, which read-only commands avoid to start faster

    with ExitStack() as stack:
        try:
            client = stack.enter_context(connect(target.server(), schema.Redis()))
            opened: OpenRun | Remains = _find_run(client, target)
        except (ResourceError, TransportError) as error:
            opened = remains_or_raise(target, error)
        yield opened


def _find_run(client: redis.Redis, target: Target) -> OpenRun:
    keys = Keys(target.run)
    state = snapshot(client, keys)
    if state.run is None:
        raise ResourceError(f"Redis at {server_name(client)} holds no run {target.run!r}")
    return OpenRun(client=client, keys=keys, info=state.run, step=state.step, reports=state.reports)
