"""`streamrl runs ls|compare|rm`: the runs in a Redis and in a folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from redis import Redis

from streamrl.errors import ConfigError, ResourceError, StreamrlError, TransportError
from streamrl.ops.cli.arguments import print_result, takes_json
from streamrl.ops.monitor.runs import Listing, list_runs, open_server, url_of_environment, with_folders
from streamrl.protocol.transport.address import URL_VARIABLE
from streamrl.protocol.transport.entries import to_run_info
from streamrl.protocol.transport.keys import RUN_NAME, Keys
from streamrl.protocol.transport.operator import remove_run
from streamrl.protocol.transport.types import RunInfo
from streamrl.terminal import age, plural, printable, size

_takes_url = click.option("--redis", "url", metavar="URL", help=f"The server; by default {URL_VARIABLE}.")


@click.group()
def runs() -> None:
    """List runs, compare them, or remove one from its Redis."""


@runs.command()
@_takes_url
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Folder with the runs' folders; default: runs.")
@takes_json
def ls(url: str | None, folder: Path | None, as_json: bool) -> None:
    """List the runs with folders here and those in the Redis of --redis or STREAMRL_REDIS; newest first.

    \b
        streamrl runs ls
        streamrl runs ls --dir /shared/runs --redis redis://host:6379

    It scans the keys of Redis for 10 seconds at most, and says so if that was not enough, or if the Redis of
    STREAMRL_REDIS does not answer. A run that is in both is listed once, with its state in Redis; folders that you may
    not read are left out. --json prints {complete, runs [{name state is_live term step parts created_at ended_at folder
    uid}]}.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--dir {folder}: no such folder")
    listing = Listing(runs=(), is_complete=True)
    if (server := url or url_of_environment()) is not None:
        try:
            with open_server(server) as client:
                listing = list_runs(client)
        except (ConfigError, ResourceError, TransportError) as error:
            if url is not None:
                raise
            click.echo(printable(f"warning: {URL_VARIABLE}: {error}; only runs with folders here are listed"), err=True)
            listing = Listing(runs=(), is_complete=False)
    found = with_folders(listing, folder or Path("runs"))
    result = {"complete": found.is_complete, "runs": [asdict(run) for run in found.runs]}
    print_result(result, _lines(found), as_json=as_json)


@runs.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN_FOLDER...")
@takes_json
def compare(folders: tuple[Path, ...], as_json: bool) -> None:
    """Compare runs from their folders, one line each: reward, held-out reward, steps, tokens, time and lag.

    \b
        streamrl runs compare runs/a runs/b

    REWARD is the last step's, BEST the best on held-out prompts in a validation that ranks checkpoints, TIME the sum
    over all steps, LAG the mean over all trained tokens.

    --json prints [{name folder state reward best_held_out steps tokens seconds lag}].
    """
    from streamrl.ops.monitor.comparison import compare as compare_runs
    from streamrl.ops.monitor.comparison import table

    rows = compare_runs(folders)
    print_result([asdict(row) for row in rows], table(rows), as_json=as_json)


@runs.command()
@_takes_url
@click.option("--run", metavar="NAME", required=True, help="The run's name.")
@click.option(
    "--live",
    "remove_live",
    is_flag=True,
    help="Remove it even if a learner holds it; what that publishes meanwhile stays in weights.store.",
)
@click.option("--keep-weights", is_flag=True, help="Leave what is in weights.store outside Redis.")
def rm(url: str | None, run: str, remove_live: bool, keep_weights: bool) -> None:
    """Remove a run from Redis (streams, metrics), and its published weights, wherever weights.store is.

    The run's folder stays; its workers and learner exit. A shared folder with the weights must be mounted here; an
    object store needs its credentials here.
    """
    if not re.fullmatch(RUN_NAME, run):
        raise ConfigError(
            f"--run {run!r}: names one run, no pattern: at most 64 letters, digits, '.', '_' and '-', starting with a "
            "letter or digit"
        )
    keys = Keys(run)
    with open_server(_server(url)) as client:
        if client.exists(keys.lease) and not remove_live:
            raise ResourceError(f"run {run!r} is live: `streamrl stop` ends it, --live removes it anyway")
        meta: Any = client.hgetall(keys.meta)
        info = to_run_info(run, meta)
        weights = _remove_weights(info, client, keys, keep=keep_weights) if info is not None else ""
        existed = remove_run(client, keys)
    click.echo(printable(f"run {run}: {f'removed{weights}' if existed else 'not in this Redis'}"))


def _remove_weights(info: RunInfo, client: Redis, keys: Keys, *, keep: bool) -> str:
    """Delete what the run has stored outside Redis, which only the run in Redis tells; return what became of it."""
    from streamrl.protocol.weights.stores import REDIS_URL, delete_run, open_store

    try:
        store = str(json.loads(info.config_json)["weights"]["store"])
    except (ValueError, KeyError, TypeError):  # no learner has written it
        return ""
    if store == REDIS_URL:
        return ""
    place = f"{store.rstrip('/')}/{info.uid}/"
    if keep:
        return f"; its weights stay in {place}"
    try:
        num_bytes = delete_run(open_store(store, client, keys), run_uid=info.uid, term=info.term)
    except StreamrlError as error:
        raise ResourceError(
            f"run {info.name!r} is not removed: its weights in {place} cannot be deleted: {error}. Try again where the "
            "store can be reached, or give --keep-weights and delete them there by hand"
        ) from error
    if not num_bytes:
        return f"; this machine sees no weights of it in {place}"
    return f", and {size(num_bytes)} of weights in {place}"


def _lines(found: Listing) -> Iterator[str]:
    width = max((len(run.name) for run in found.runs), default=0)
    for run in found.runs:
        live = "live" if run.is_live else ""
        times = {"began": run.created_at, "ended": run.ended_at}
        when = ", ".join(f"{event} {age(time.time() - at)} ago" for event, at in times.items() if at)
        line = f"{run.name:<{width}}  {run.state:<9}{live:<6}step {run.step:<8}term {run.term:<4}{when}"
        yield f"{line}  {run.folder or ''}".rstrip()
    yield plural(len(found.runs), "run") + ("" if found.is_complete else ", and perhaps more")


def _server(url: str | None) -> str:
    url = url or url_of_environment()
    if url is None:
        raise ConfigError(f"give --redis URL, or set {URL_VARIABLE}")
    return url
