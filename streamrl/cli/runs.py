"""`streamrl runs ls|rm`: the runs of a Redis."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict

import click

from streamrl.errors import ConfigError, ResourceError
from streamrl.monitor.opening import URL_VARIABLE

_redis = click.option("--redis", "url", metavar="URL", help=f"The server; by default {URL_VARIABLE}.")


@click.group()
def runs() -> None:
    """List the runs of a Redis, or remove one."""


@runs.command()
@_redis
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(url: str | None, as_json: bool) -> None:
    """List all runs that a Redis holds, the youngest first.

    It goes through the keys page by page for 10 seconds at most, and says so when that was not enough. --json prints
    {complete, runs [{name state is_live epoch step parts created_at}]}.
    """
    from streamrl.monitor.opening import open_server
    from streamrl.monitor.runs import list_runs
    from streamrl.monitor.units import age
    from streamrl.terminal import printable

    with open_server(_server(url)) as client:
        found = list_runs(client)
    if as_json:
        click.echo(json.dumps({"complete": found.is_complete, "runs": [asdict(run) for run in found.runs]}, indent=2))
        return
    width = max((len(run.name) for run in found.runs), default=0)
    for run in found.runs:
        live = "live" if run.is_live else ""
        began = f"began {age(time.time() - run.created_at)} ago" if run.created_at else ""
        line = f"{run.name:<{width}}  {run.state:<9}{live:<6}step {run.step:<8}epoch {run.epoch:<4}{began}"
        click.echo(printable(line.rstrip()))
    count = len(found.runs)
    click.echo(f"{count} run{'' if count == 1 else 's'}" + ("" if found.is_complete else ", and perhaps more"))


@runs.command()
@_redis
@click.option("--run", metavar="NAME", required=True, help="Its name.")
@click.option("--live", "even_live", is_flag=True, help="Even one that a learner holds.")
def rm(url: str | None, run: str, even_live: bool) -> None:
    """Remove a run from Redis: streams, weights, metrics. Its folder stays; its workers and learner leave."""
    from streamrl.monitor.opening import open_server
    from streamrl.terminal import printable
    from streamrl.transport.keys import Keys
    from streamrl.transport.operate import remove_run

    keys = Keys(run)
    with open_server(_server(url)) as client:
        if client.exists(keys.lease) and not even_live:
            raise ResourceError(f"run {run!r} is live: `streamrl stop` ends it, --live removes it all the same")
        there = remove_run(client, keys)
    click.echo(printable(f"run {run}: {'removed' if there else 'there was none'}"))


def _server(url: str | None) -> str:
    url = url or os.environ.get(URL_VARIABLE)
    if url is None:
        raise ConfigError(f"give --redis URL, or set {URL_VARIABLE}")
    return url
