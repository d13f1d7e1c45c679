"""`streamrl environment`: serve one over HTTP. The server loads inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from streamrl.config import schema
from streamrl.extras import need
from streamrl.files import write_durably
from streamrl.ops.cli.arguments import OutputFile
from streamrl.ops.cli.reward_try import as_option
from streamrl.permissions import Permissions
from streamrl.process import address_of, bind

_DEFAULTS = schema.Environment.model_fields


@click.group()
def environment() -> None:
    """Serve an environment to the workers of a run."""


@environment.command()
@click.argument("target", metavar="FILE:CLASS")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="A keyword argument of the class.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0: any free one.")
@click.option(
    "--processes", type=click.IntRange(min=1), default=_DEFAULTS["processes"].default, help="That rollouts live in."
)
@click.option(
    "--timeout-s", type=float, default=_DEFAULTS["timeout_s"].default, help="For one answer; less than workers wait."
)
@click.option(
    "--memory-mb", type=click.IntRange(min=1), default=_DEFAULTS["memory_mb"].default, help="Of each process."
)
@click.option("--network", is_flag=True, help="It may open connections.")
@click.option("--env", "environment", multiple=True, metavar="NAME", help="Give it this variable.")
@click.option("--token-file", help="File with the bearer token that callers must send.")
@click.option("--url-file", type=OutputFile(), help="File to write the server's URL to, once it listens.")
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
    SIGTERM ends it after what was asked is answered.
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

        run(EnvironmentApp(OwnEnvironment(build_children(settings, permissions)), token=token), bound, ready)
