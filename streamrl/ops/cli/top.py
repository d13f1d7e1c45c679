"""`streamrl top`: a run, live, in this terminal."""

from __future__ import annotations

import click

from streamrl.ops.cli.arguments import takes_run
from streamrl.ops.monitor.runs import Target, opened


@click.command()
@takes_run
@click.option("--every-s", type=click.FloatRange(min=0.1), default=0.5, help="How often to look at Redis.")
def top(target: Target, every_s: float) -> None:
    """Watch a run live: learner, workers, rewards, streams, weights, and what holds it back.

    \b
        streamrl top runs/quickstart
        streamrl top --redis redis://host:6379 --run big

    It only reads, from any machine that reaches Redis. It fits on 80 x 24 and uses more where there is more; NO_COLOR=1
    turns colours off.

    \b
    Keys: q quit  s sort  r reverse  / filter  f freeze  arrows choose, enter opens a worker or a group, esc goes back
          g groups  w why  ? help
    """
    from streamrl.ops.monitor.top.loop import run

    with opened(target) as there:
        run(there, period_s=every_s)
