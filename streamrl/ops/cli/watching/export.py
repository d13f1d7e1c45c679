"""`streamrl export`: a run for other monitoring systems, Prometheus and Grafana."""

from __future__ import annotations

import json

import click

from streamrl.extras import need
from streamrl.ops.cli.arguments import takes_run
from streamrl.ops.monitor.runs import Target
from streamrl.process import address_of, bind
from streamrl.protocol.transport.address import masked


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
