"""`streamrl environment`: serve one over HTTP, print a taskset's prompts. The server is imported in the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.extras import need
from streamrl.files import write_durably
from streamrl.ops.cli.arguments import OutputFile
from streamrl.ops.cli.rewards.options import as_option
from streamrl.permissions import Permissions
from streamrl.process import address_of, bind
from streamrl.recipe import tasksets

_DEFAULTS = schema.Environment.model_fields
_WAIT = 1 / 8  # share of the time limit that a call waits for a free thread before it gets a 429


@click.group()
def environment() -> None:
    """Serve an environment to the workers of a run; make prompts of a taskset."""


@environment.command()
@click.argument("taskset")
@click.option("--python", required=True, metavar="FILE", help="Python interpreter with verifiers and the taskset.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="A setting of the taskset.")
@click.option("--first", type=click.IntRange(min=0), default=0, help="Index of the first task.")
@click.option("--count", type=click.IntRange(min=1), default=1000, help="Number of tasks, at most.")
def tasks(taskset: str, *, python: str, options: tuple[str, ...], first: int, count: int) -> None:
    """Print tasks of verifiers as prompts, one JSON line each.

    Redirect the output to a file for data.train. For held-out prompts start after those (--first). The run plays them
    with environment.target = verifiers and the same interpreter and taskset in environment.options.
    """
    try:
        for row in tasksets.tasks(python, {"id": taskset, **dict(map(as_option, options))}, first=first, count=count):
            click.echo(row)
    except ValueError as error:
        raise DataError(f"taskset {taskset}: {error}") from None


@environment.command()
@click.argument("target", metavar="FILE:CLASS")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="A keyword argument of the class.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0: any free port.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=_DEFAULTS["processes"].default,
    help="Processes that run the rollouts.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=0.8 * _DEFAULTS["timeout_s"].default,
    help="Per answer. Nine eighths of it must be less than the workers' environment.timeout_s: they get its failure.",
)
@click.option(
    "--memory-mb", type=click.IntRange(min=1), default=_DEFAULTS["memory_mb"].default, help="Memory limit per process."
)
@click.option("--network", is_flag=True, help="Allow the environment to open connections.")
@click.option("--env", "environment", multiple=True, metavar="NAME", help="Pass this variable to the environment.")
@click.option("--token-file", help="File with the bearer token that callers must send.")
@click.option("--url-file", type=OutputFile(), help="File for the server's URL, written once it listens.")
def serve(
    target: str,
    *,
    host: str,
    port: int,
    options: tuple[str, ...],
    token_file: str | None,
    url_file: Path | None,
    **limits: Any,
) -> None:
    """Serve an environment: POST /reset, /step and /close, GET /health.

    FILE:CLASS is what `environment.target` names: path/to/file.py:Class, package.module:Class or a built-in name.
    Prints one line with its URL when it is ready; name it in a configuration's environment.urls, and its replicas too.
    On SIGTERM it answers open requests and exits.
    """
    need("the environment server", "starlette", "uvicorn", "httpx", extra="rewards")
    from streamrl.workers.environments.own import OwnEnvironment, build_children
    from streamrl.workers.environments.server import EnvironmentApp, run
    from streamrl.workers.rewards.http_request import read_token

    token = None if token_file is None else read_token(token_file, key="--token-file")
    settings = schema.Environment(target=target, options=dict(map(as_option, options)), **limits)
    permissions = Permissions(
        reward_code=(target,),
        reward_network=(target,) if settings.network else (),
        reward_environment=settings.environment,
    )
    with bind(host, port, what="environment server") as bound:
        url = f"http://{address_of(bound, host=host)}"

        def ready() -> None:
            if url_file is not None:
                write_durably(url_file, url.encode())
            click.echo(f"environment server: {target} at {url}")

        children = build_children(settings, permissions, longest_wait_s=settings.timeout_s * _WAIT)
        run(EnvironmentApp(OwnEnvironment(children), token=token), bound, ready)
