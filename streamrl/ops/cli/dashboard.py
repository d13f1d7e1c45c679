"""`streamrl dashboard`: a run in the browser, read-only."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TextIO

import click

from streamrl.errors import ConfigError
from streamrl.extras import need
from streamrl.ops.cli.arguments import takes_run
from streamrl.ops.monitor.runs import Target, opened
from streamrl.process import LOOPBACK, address_of, bind


@click.command()
@takes_run
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8420, help="0: any free one.")
@click.option("--token", "makes_token", is_flag=True, help="Make up a token that readers must have.")
@click.option("--token-file", type=click.File(), help="File with the token that readers must have.")
def dashboard(target: Target, host: str, port: int, makes_token: bool, token_file: TextIO | None) -> None:
    """Show a run in the browser: curves, idle time by cause, versions by worker, rollouts.

    \b
        streamrl dashboard runs/quickstart                    http://127.0.0.1:8420, for this machine alone
        streamrl dashboard --redis URL --run big --port 0     any free port
        ssh -L 8420:127.0.0.1:8420 HOST                       from elsewhere, without opening a port
        streamrl dashboard RUN --host 0.0.0.0 --token         open to the network, behind a token

    One page, nothing loaded from elsewhere, nothing written. Beyond loopback a token is needed. --token makes one up
    and prints the address with it; --token-file reads one. GET /metrics is for Prometheus.
    """
    token = token_file.read().strip() if token_file else secrets.token_urlsafe(24) if makes_token else None
    if token == "":
        raise ConfigError("--token-file: the file is empty")
    only_loopback = host in LOOPBACK
    if not only_loopback and token is None:
        raise ConfigError(f"--host {host}: others may reach it, so a token is needed; add --token or --token-file FILE")
    need("the dashboard", "starlette", "uvicorn", "prometheus_client", extra="monitor")
    from streamrl.ops.monitor.web.server import Dashboard
    from streamrl.web import Server

    with opened(target) as there, bind(host, port, what="dashboard") as listener:
        url = f"http://{address_of(listener, host=host)}/" + (f"#token={token}" if token else "")
        board = Dashboard(there, token=token, only_loopback=only_loopback)
        ready = partial(click.echo, f"dashboard of {target.run}: {url}")
        Server(board.app(), on_ready=ready, timeout_graceful_shutdown=2).run(sockets=[listener])
