"""Read-only views of a run: `streamrl status|why|top` in the terminal, `dashboard` in the browser, `plot` as a PNG,
`export` for other monitoring systems.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from streamrl.errors import ConfigError, DataError, ResourceError, TransportError
from streamrl.extras import need
from streamrl.ops.cli.arguments import OutputFile, print_result, refuse, takes_json, takes_run, takes_server
from streamrl.ops.monitor.causes import unreachable
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.poller import look_once
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.runs import Target, find_target, opened
from streamrl.ops.monitor.text import WIDTH, cause_lines, status_lines, why_lines
from streamrl.ops.monitor.view import EXIT_CODES, EXIT_UNREACHABLE, SCHEMA, View
from streamrl.process import LOOPBACK, address_of, bind
from streamrl.protocol.transport.address import masked

_NARROWEST = 40  # columns
_EXITS = """\b
Exits with
  0 healthy: it runs, or has finished         4 stalled: nothing moves
  3 degraded: it runs, needs attention        5 ended: stopped, failed, crashed, or not there
  6 Redis does not answer                     2 a mistake in the command line
"""


@click.command(epilog=_EXITS)
@takes_run
@takes_json
def status(target: Target, as_json: bool) -> int:
    """Show a run's state on one screen, and exit.

    \b
        streamrl status runs/quickstart
        streamrl status --redis redis://host:6379 --run big --json

    \b
    --json prints one object; names stay as they are as long as `schema` does, and more may be added:
      schema, at, verdict {healthy degraded stalled ended unreachable}, causes [{name level title evidence remedy}]
      run {name uid state control term step max_steps data_epochs created_at ended_at eta_s share_done error folder}
      summary {..}   of summary.json, where the folder alone tells (run.folder): Redis is not there any more
      limits {max_lag_steps groups_per_step max_backlog_bytes idle_timeout_s max_attempts stale model_dtype
        weights_dtype arithmetic reward_sources}
      learner {lead {PART} ranks holder lease_left_s metrics {name: value} validation {name: value} rewards [..]
        skipped_lately fresh_mismatch [..] held_out {source: [..]} live {name: value}}
      workers [{part {PART} version step lag tokens_per_s in_flight kv_use leases delivered failed loads
        loads_in_flight rejected rejected_version detail}]
      restarts   others [{PART}]   where PART is {name role host pid state doing doing_s progress_s report_s}
      rewards [{name mean latency_s scored errors state}]
      streams [{purpose tickets leased groups group_bytes oldest_worker oldest_s oldest_silent_s oldest_times}]
      weights {latest step age_s kept num_bytes largest_bytes changed_share behind worst_lag}
      drops, drops_lately {trained dropped by_reason rate_by_length ignored}
      dead {count retry_requests latest [{ticket error}]}
      redis {server version used_bytes max_bytes policy role save_error}   unreadable [..]

    If Redis does not answer: only schema, at, verdict, causes, and the run's name.

    If a run's Redis is gone, its folder says how it ended: finished, stopped, failed, or crashed.
    """
    lines = partial(status_lines, width=WIDTH if sys.stdout.isatty() else None)
    unseen = {"at": time.time(), "run": {"name": target.run}}
    return _answer(target, View.to_json, lines, unseen=unseen, as_json=as_json)


@click.command(epilog=_EXITS)
@takes_run
@takes_json
def why(target: Target, as_json: bool) -> int:
    """Say what holds a run back now, with evidence and remedy; the cause that explains others comes first.

    \b
        streamrl why runs/quickstart
        !!  there are no workers
            seen   12 tickets wait, and no worker reports
            do     start one, on any machine: streamrl worker --redis URL --run NAME

    !! marks what blocks the run, ! what needs attention; the others are information.

    \b
    --json prints {schema, run, verdict, causes [{name level title evidence remedy}]}.
    """
    lines = partial(why_lines, width=_width())
    return _answer(target, _causes, lines, unseen={"run": target.run}, as_json=as_json)


def _answer(
    target: Target,
    to_json: Callable[[View], Any],
    lines: Callable[[View], Iterable[str]],
    *,
    unseen: Mapping[str, Any],  # what its JSON has of a run that cannot be seen
    as_json: bool,
) -> int:
    """Look at the run once, print the result, and return the exit code."""
    try:
        with opened(target) as opened_run:
            view = look_once(opened_run)
    except (ResourceError, TransportError) as error:
        cause = unreachable(str(error))
        result = {"schema": SCHEMA, **unseen, "verdict": "unreachable", "causes": [asdict(cause)]}
        unreachable_lines = [f"{target.run}: unreachable", "", *cause_lines(cause, width=_width())]
        print_result(result, unreachable_lines, as_json=as_json, indent=None)
        return EXIT_UNREACHABLE
    print_result(to_json(view), lines(view), as_json=as_json, indent=None)
    return EXIT_CODES[view.verdict]


def _width() -> int:
    """Return the width to wrap sentences to: the terminal's if narrower, so that it does not break words."""
    return max(_NARROWEST, min(WIDTH, shutil.get_terminal_size((WIDTH, 1)).columns))


def _causes(view: View) -> dict[str, Any]:
    return {"schema": SCHEMA, "run": view.run.name, "verdict": view.verdict, "causes": view.to_json()["causes"]}


@click.command()
@takes_run
@click.option("--every-s", type=click.FloatRange(min=0.1), default=0.5, help="Interval for reading from Redis.")
def top(target: Target, every_s: float) -> None:
    """Watch a run live: learner, workers, rewards, streams, weights, and what holds it back.

    \b
        streamrl top runs/quickstart
        streamrl top --redis redis://host:6379 --run big

    It only reads, from any machine that reaches Redis. It fits into 80 x 24 and uses more space if there is more;
    NO_COLOR=1 turns colours off.

    \b
    Keys: q quit  s sort  r reverse  / filter  f freeze  arrows choose, enter opens a worker or a group, esc goes back
          g groups  w why  ? help
    """
    from streamrl.ops.monitor.top.loop import run

    with opened(target) as opened_run:
        run(opened_run, period_s=every_s)


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


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN_FOLDER]...")
@takes_server
@click.option("-o", "--output", type=OutputFile(suffix=".png"), help="Output file; default: NAME.png in this folder.")
def plot(folders: tuple[Path, ...], url: str | None, run: str | None, output: Path | None) -> None:
    """Draw reward, KL, lag, throughput, time, correction, loss and length of a run, or of several, into one PNG.

    \b
        streamrl plot runs/quickstart                     from the folder: every step, also without Redis
        streamrl plot runs/a runs/b                       one over the other, from their folders
        streamrl plot --redis redis://host:6379 --run big -o big.png
                                                          from Redis: recent steps in full, older ones thinned
    """
    from streamrl.ops.monitor.charts import save_report

    if len(folders) > 1:
        _plot_several(folders, url or run, output)
        return
    name, history = _read_history(folders[0] if folders else None, url, run)
    if not history.steps.records and not history.validations.records:
        raise DataError(f"run {name!r} has no metrics yet: its first step has not finished")
    output = output or Path(f"{name}.png")
    steps = history.steps.records
    save_report(output, history, title=f"{name}, {steps[-1].step if steps else 0} steps")
    click.echo(f"{output}: {len(steps)} steps, {len(history.validations.records)} validations")


def _plot_several(folders: Sequence[Path], redis_options: str | None, output: Path | None) -> None:
    from streamrl.ops.monitor.comparison import histories, save_overlay

    if redis_options is not None:
        raise ConfigError("several runs are plotted from their folders: leave out --redis and --run")
    runs = histories(folders)
    output = output or Path("-against-".join(Path(name).name for name in runs) + ".png")
    save_overlay(output, runs)
    steps = (f"{name} {len(history.steps.records)} steps" for name, history in runs.items())
    click.echo(f"{output}: {', '.join(steps)}")


def _read_history(folder: Path | None, url: str | None, run: str | None) -> tuple[str, History]:
    """Return the run's name and its history."""
    if folder is not None and url is None:
        refuse("run", because="only with --redis: a folder holds one run")
        if not (folder / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{folder} has no metrics.jsonl: it is not a run's folder, or the run has not finished a step yet"
            )
        return folder.resolve().name, History.read(folder)
    target = find_target(folder, url, run)
    history = History()
    with opened(target) as opened_run:
        if isinstance(opened_run, Remains):
            return opened_run.name, opened_run.history
        history.refresh(opened_run.client, opened_run.keys)
    return target.run, history


@click.group()
def export() -> None:
    """Export a run to Prometheus and Grafana."""


@export.command()
@takes_run
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9464, help="0: any free port.")
def prometheus(target: Target, host: str, port: int) -> None:
    """Serve GET /metrics of one run, until Ctrl-C.

    It serves numbers and names of parts only, no text of rollouts, and listens on loopback unless you set --host. While
    Redis is down, streamrl_up is 0, and the other metrics are from the last time that it answered.
    `streamrl dashboard` serves the same at its own /metrics.
    """
    need("the exporter", "prometheus_client", extra="monitor")
    from streamrl.ops.monitor.exporter import serve_metrics

    with bind(host, port, what="exporter") as bound:
        url = f"http://{address_of(bound, host=host)}/metrics"

        def ready(error: str) -> None:
            click.echo(f"metrics of {target.run}: {url}")
            if error:
                click.echo(
                    f"waiting for Redis at {masked(target.server())}: streamrl_up is 0 until it answers", err=True
                )

        serve_metrics(target, bound, ready=ready)


@export.command()
def alerts() -> None:
    """Print alert rules for Prometheus: stalled, gone, lag, drops, dead letters, Redis full.

    `streamrl export alerts > streamrl-alerts.yaml`, and name the file under rule_files.
    """
    import yaml

    from streamrl.ops.monitor.alerts import alert_rules

    click.echo(yaml.safe_dump(alert_rules(), sort_keys=False, width=120), nl=False)


@export.command()
def grafana() -> None:
    """Print a Grafana dashboard as JSON, to be imported as it is."""
    from streamrl.ops.monitor.alerts import grafana_dashboard

    click.echo(json.dumps(grafana_dashboard(), indent=2))
