"""`streamrl dashboard`: a run in the browser, read-only."""

from __future__ import annotations

import secrets
import sys
from functools import partial
from typing import TextIO

import click

from streamrl.errors import ConfigError
from streamrl.extras import need
from streamrl.ops.cli.arguments import refuse, takes_run
from streamrl.ops.monitor.runs import Target, opened
from streamrl.process import LOOPBACK, address_of, bind


@click.command()
@takes_run
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, help="0: any free port.")
@click.option("--token", "makes_token", is_flag=True, help="Create a token that readers need.")
@click.option("--token-file", type=click.File(), help="File with the token that readers need.")
@click.option("--allow-host", "names", multiple=True, metavar="NAME", help="Also answer to this host name.")
def dashboard(
    target: Target, host: str, port: int, makes_token: bool, token_file: TextIO | None, names: tuple[str, ...]
) -> None:
    """Show a run in the browser: curves, idle time by cause, versions by worker, rollouts.

    \b
        streamrl dashboard runs/quickstart                    http://127.0.0.1:8420, for this machine alone
        streamrl dashboard --redis URL --run big --port 0     any free port
        ssh -L 8420:127.0.0.1:8420 HOST                       from elsewhere, without opening a port
        streamrl dashboard RUN --host 0.0.0.0 --token         open to the network, behind a token

    One page that loads nothing from elsewhere and writes nothing. Beyond loopback it needs a token: --token creates one
    and shows it with the address on a terminal; --token-file reads one. It answers to addresses and to localhost; add
    other names, such as an ingress's, with --allow-host. GET /metrics is for Prometheus.
    """
    if token_file is not None:
        refuse("makes_token", because="not with --token-file, which has the token")
    is_terminal = sys.stdout.isatty()  # a log is no place for a token
    if makes_token and not is_terminal:
        raise ConfigError(
            "--token prints its token to a terminal, and stdout is none; put one in a file: --token-file FILE"
        )
    token = token_file.read().strip() if token_file else secrets.token_urlsafe(24) if makes_token else None
    if token == "":
        raise ConfigError("--token-file: the file is empty")
    if host not in LOOPBACK and token is None:
        raise ConfigError(f"--host {host}: others may reach it, so a token is needed; add --token or --token-file FILE")
    need("the dashboard", "starlette", "uvicorn", "prometheus_client", extra="monitor")
    from streamrl.ops.monitor.web.guard import Guard
    from streamrl.ops.monitor.web.server import Dashboard
    from streamrl.web import Server

    with opened(target) as opened_run, bind(host, port, what="dashboard") as listener:
        url = f"http://{address_of(listener, host=host)}/"
        if token is not None:
            url += (
                f"#token={token}"
                if is_terminal
                else f" (append #token= and the content of {token_file.name if token_file else ''})"
            )
        board = Dashboard(opened_run, Guard(listens_on=host, token=token, names=[name.lower() for name in names]))
        ready = partial(click.echo, f"dashboard of {target.run}: {url}")
        Server(board.app(), on_ready=ready, timeout_graceful_shutdown=2).run(sockets=[listener])
