"""`streamrl status` and `streamrl why`: how a run is, and what holds it back. They only read, and answer at once."""

from __future__ import annotations

from dataclasses import asdict

import click

from streamrl.errors import ResourceError, TransportError
from streamrl.ops.cli.arguments import takes_json, takes_run, tell
from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.causes import unreachable
from streamrl.ops.monitor.poller import NUM_EVENTS
from streamrl.ops.monitor.runs import Target, opened
from streamrl.ops.monitor.text import cause_lines, status_lines, why_lines
from streamrl.ops.monitor.view import EXIT_CODES, EXIT_UNREACHABLE, SCHEMA, View
from streamrl.protocol.transport.snapshot import snapshot

_RECORDS = 60  # steps: for a short curve of the reward, and the pace

_EXITS = """\b
Exits with
  0 healthy: it runs, or has finished      4 stalled: nothing moves
  3 degraded: it runs, somebody should look   5 ended: stopped, failed, or not there
  6 Redis does not answer                     2 a mistake in the command line
"""


@click.command(epilog=_EXITS)
@takes_run
@takes_json
def status(target: Target, as_json: bool) -> int:
    """Show how a run is, on one screen, and exit.

    \b
        streamrl status runs/quickstart
        streamrl status --redis redis://host:6379 --run big --json

    \b
    --json prints one object; names stay as they are as long as `schema` does, and more may be added:
      schema, at, verdict {healthy degraded stalled ended unreachable}, causes [{name level title evidence remedy}]
      run {name uid state control term step max_steps data_epochs created_at eta_s share_done error}
      limits {max_lag_steps groups_per_step max_backlog_bytes idle_timeout_s max_attempts stale arithmetic
        reward_sources}
      learner {lead {PART} ranks holder lease_left_s metrics {name: value} rewards [..] fresh_mismatch [..]
        held_out {source: [..]} live {name: value}}
      workers [{part {PART} version step lag tokens_per_s in_flight kv_use leases delivered failed loads
        loads_in_flight rejected rejected_version detail}]
      restarts   others [{PART}]   where PART is {name role host pid state doing doing_s progress_s report_s}
      rewards [{name mean latency_s scored errors state}]
      streams [{purpose tickets leased groups group_bytes oldest_worker oldest_s oldest_silent_s oldest_times}]
      weights {latest step age_s kept num_bytes largest_bytes changed_share behind worst_lag}
      drops {trained dropped by_reason rate_by_length ignored}   dead {count retry_requests latest [{ticket error}]}
      redis {server version used_bytes max_bytes policy role save_error}   unreadable [..]
    """
    try:
        view = look(target)
    except (ResourceError, TransportError) as error:
        return _unreachable(target, error, as_json=as_json)
    tell(view.to_json(), status_lines(view), as_json=as_json, indent=None)
    return EXIT_CODES[view.verdict]


@click.command(epilog=_EXITS)
@takes_run
@takes_json
def why(target: Target, as_json: bool) -> int:
    """Say what holds a run back now, with the evidence and the remedy; what explains the rest comes first.

    \b
        streamrl why runs/quickstart
        !!  there are no workers
            seen   12 tickets wait and nobody reports
            do     start one: streamrl worker --redis URL --run NAME; it may join from any machine

    !! marks what stops the run, ! what somebody should look at; the others explain why it does what it does.

    \b
    --json prints {schema, run, verdict, causes [{name level title evidence remedy}]}.
    """
    try:
        view = look(target)
    except (ResourceError, TransportError) as error:
        return _unreachable(target, error, as_json=as_json)
    told = {"schema": SCHEMA, "run": view.run.name, "verdict": view.verdict, "causes": view.to_json()["causes"]}
    tell(told, why_lines(view), as_json=as_json, indent=None)
    return EXIT_CODES[view.verdict]


def look(target: Target) -> View:
    with opened(target) as there:
        seen = snapshot(there.client, there.keys, num_records=_RECORDS, num_events=NUM_EVENTS)
        return build_view(seen, run_name=target.run, server=there.server)


def _unreachable(target: Target, error: Exception, *, as_json: bool) -> int:
    cause = unreachable(str(error))
    told = {"schema": SCHEMA, "run": {"name": target.run}, "verdict": "unreachable", "causes": [asdict(cause)]}
    tell(told, [f"{target.run}: unreachable", "", *cause_lines(cause)], as_json=as_json, indent=None)
    return EXIT_UNREACHABLE
