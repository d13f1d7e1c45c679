"""Whole runs on this machine: `streamrl up` for a configuration, `streamrl quickstart`, `game` and `demo` for
demonstrations (a model made on the spot, or a pretrained one).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from streamrl.config.check import check_config
from streamrl.config.load import Loaded, load_config
from streamrl.ops.cli.arguments import print_result, takes_config, takes_overrides
from streamrl.ops.cli.training.forks import check_fork, fork_from, takes_fork

if TYPE_CHECKING:
    from streamrl.ops.launch.display import Audience
    from streamrl.ops.launch.up import RunOutcome
    from streamrl.ops.monitor.remains import Remains


@click.command()
@takes_config
@click.option(
    "--takeover", is_flag=True, help="Replace a learner on another machine that holds the run; it exits by itself."
)
@takes_fork
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on the last line.")
def up(file: str, overrides: tuple[str, ...], takeover: bool, source: str | None, new_data: bool, as_json: bool) -> int:
    """Run everything on this machine: Redis, reward server, workers, learner.

    \b
        streamrl up conf/mine.yaml
        streamrl up conf/mine.yaml name=hotter optimizer.lr=2e-6 --fork runs/mine@120

    Ctrl-C stops it cleanly: the learner finishes its step and writes a checkpoint. A second Ctrl-C ends it at once.
    Started again, it resumes from the last checkpoint. If the run has finished and these settings leave nothing to do,
    it says so at once and exits with 0, without starting Redis or the learner. Changes of settings that a resumed run
    must keep are refused in either case.
    """
    from rich.console import Console

    from streamrl.ops.launch.display import Display
    from streamrl.ops.launch.finished import finished_lines
    from streamrl.ops.launch.summary import summary_lines
    from streamrl.ops.monitor.remains import Remains

    check_fork(source, new_data=new_data)
    loaded = load_config(file, overrides)
    if source is not None:
        check_config(loaded.config, loaded.origin)  # before the folder of the fork is there
        fork_from(source, loaded.config, new_data=new_data)
    console = Console(stderr=as_json)
    outcome = start_or_resume(loaded, Display(console), takeover=takeover, is_fork=source is not None)
    if isinstance(outcome, Remains):
        result = outcome.summary or {"name": outcome.name, "state": outcome.state, "steps": outcome.step}
        lines = finished_lines(outcome, loaded.config.training, file, overrides)
        print_result(result, lines, as_json=as_json, indent=None)
        return 0
    if outcome.summary is not None:
        for name, value in summary_lines(outcome.summary):
            console.print(f"{name:<18}{value}", markup=False, highlight=False, soft_wrap=True)
        if as_json:
            click.echo(json.dumps(outcome.summary.to_json()))
    return outcome.exit_code


def start_or_resume(
    loaded: Loaded, display: Audience, *, takeover: bool = False, is_fork: bool = False
) -> RunOutcome | Remains:
    """Start or resume the run of this configuration; return what its folder records if nothing is left to do. Changes
    that a resumed run may not make are refused in either case.

    `is_fork`: the folder was made just now, and its checkpoint is of no earlier start. Called by the command, and by
    programs through `streamrl.start`.
    """
    from streamrl.learner.checkpoints.resume import changed_since_checkpoint, check_resume
    from streamrl.ops.launch.finished import nothing_left_of
    from streamrl.ops.launch.up import up as run_up

    if not is_fork:
        check_resume(loaded.config)
    changed = changed_since_checkpoint(loaded.config)
    if (remains := nothing_left_of(loaded.config)) is not None:
        for change in changed:
            display.notify(f"not used, since the run has finished: {change}")
        return remains
    for change in changed:
        display.notify(f"changed since the checkpoint: {change}")
    return run_up(loaded, display=display, takeover=takeover)


_takes_numbers = click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON on the last line.")


@click.command()
@takes_overrides
@_takes_numbers
def quickstart(overrides: tuple[str, ...], as_json: bool) -> int:
    """Build a small model and train it with RL in a few minutes, with everything a large run has.

    It starts from scratch each time. `seed=2` changes data, warm-up and run; conf/quickstart.yaml has the settings.
    """
    from streamrl.demos.quickstart import QUICKSTART
    from streamrl.demos.run import run_showcase

    return run_showcase(QUICKSTART, overrides, as_json=as_json)


@click.command()
@takes_overrides
@_takes_numbers
def game(overrides: tuple[str, ...], as_json: bool) -> int:
    """Build a small model and train it on a multi-turn game, guessing a number, in a few minutes.

    It starts from scratch each time. The environment is streamrl/demos/game.py; conf/game.yaml has the settings.
    """
    from streamrl.demos.game import GAME
    from streamrl.demos.run import run_showcase

    return run_showcase(GAME, overrides, as_json=as_json)


@click.command()
@takes_overrides
@_takes_numbers
def demo(overrides: tuple[str, ...], as_json: bool) -> int:
    """Train a pretrained model of 135M parameters on sums with RL, in about a quarter of an hour.

    It starts from scratch each time, except for the model, which is prepared once. `seed=2` changes sums and run;
    conf/demo.yaml has the settings, conf/pretrained.yaml those for your own model.
    """
    from streamrl.demos.pretrained import DEMO
    from streamrl.demos.run import run_showcase

    return run_showcase(DEMO, overrides, as_json=as_json)
