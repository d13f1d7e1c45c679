"""`streamrl status|why|top`: the state of a run in the terminal, and what holds it back."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from streamrl.errors import ResourceError, TransportError
from streamrl.ops.cli.arguments import print_result, takes_json, takes_run
from streamrl.ops.monitor.causes import unreachable
from streamrl.ops.monitor.poller import look_once
from streamrl.ops.monitor.runs import Target, opened
from streamrl.ops.monitor.text import WIDTH, cause_lines, status_lines, why_lines
from streamrl.ops.monitor.view import EXIT_CODES, EXIT_UNREACHABLE, SCHEMA, View

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
      limits {max_lag_steps groups_per_step max_backlog_bytes idle_timeout_s max_attempts stale
        checkpoint_timeout_s model_dtype weights_dtype arithmetic reward_sources}
      learner {lead {PART} ranks holder lease_left_s metrics {name: value} validation {name: value} rewards [..]
        step_s is_new skipped_lately fresh_mismatch [..] held_out {source: [..]} live {name: value}}
      workers [{part {PART} version step lag tokens_per_s in_flight kv_use leases delivered failed loads
        loads_in_flight rejected rejected_version detail}]
      restarts   others [{PART}]   where PART is {name role host pid state doing doing_s progress_s report_s}
      rewards [{name mean latency_s scored errors state}]
      streams [{purpose tickets leased groups group_bytes oldest_worker oldest_s oldest_silent_s oldest_times}]
      weights {latest step age_s kept num_bytes largest_bytes changed_share published behind worst_lag}
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
