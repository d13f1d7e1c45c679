"""`streamrl runs ls|rm`: the runs of a Redis."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict

import click

from streamrl.errors import ConfigError, ResourceError
from streamrl.ops.cli.arguments import takes_json, tell
from streamrl.ops.monitor.runs import URL_VARIABLE, Listing, list_runs, open_server
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run
from streamrl.terminal import age, plural, printable

_redis = click.option("--redis", "url", metavar="URL", help=f"The server; by default {URL_VARIABLE}.")


@click.group()
def runs() -> None:
    """List the runs of a Redis, or remove one."""


@runs.command()
@_redis
@takes_json
def ls(url: str | None, as_json: bool) -> None:
    """List all runs that a Redis holds, the youngest first.

    It goes through the keys page by page for 10 seconds at most, and says so when that was not enough. --json prints
    {complete, runs [{name state is_live term step parts created_at}]}.
    """
    with open_server(_server(url)) as client:
        found = list_runs(client)
    told = {"complete": found.is_complete, "runs": [asdict(run) for run in found.runs]}
    tell(told, _lines(found), as_json=as_json)


@runs.command()
@_redis
@click.option("--run", metavar="NAME", required=True, help="Its name.")
@click.option("--live", "even_live", is_flag=True, help="Even one that a learner holds.")
def rm(url: str | None, run: str, even_live: bool) -> None:
    """Remove a run from Redis: streams, weights, metrics. Its folder stays; its workers and learner leave."""
    keys = Keys(run)
    with open_server(_server(url)) as client:
        if client.exists(keys.lease) and not even_live:
            raise ResourceError(f"run {run!r} is live: `streamrl stop` ends it, --live removes it all the same")
        there = remove_run(client, keys)
    click.echo(printable(f"run {run}: {'removed' if there else 'there was none'}"))


def _lines(found: Listing) -> Iterator[str]:
    width = max((len(run.name) for run in found.runs), default=0)
    for run in found.runs:
        live = "live" if run.is_live else ""
        began = f"began {age(time.time() - run.created_at)} ago" if run.created_at else ""
        yield f"{run.name:<{width}}  {run.state:<9}{live:<6}step {run.step:<8}term {run.term:<4}{began}".rstrip()
    yield plural(len(found.runs), "run") + ("" if found.is_complete else ", and perhaps more")


def _server(url: str | None) -> str:
    url = url or os.environ.get(URL_VARIABLE)
    if url is None:
        raise ConfigError(f"give --redis URL, or set {URL_VARIABLE}")
    return url
