"""`streamrl up`: run a configuration on this machine."""

from __future__ import annotations

import json

import click

from streamrl.config.load import load_config
from streamrl.ops.cli.arguments import takes_config


@click.command()
@takes_config
@click.option("--takeover", is_flag=True, help="Replace a learner elsewhere that holds the run; it ends by itself.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, in the last line.")
def up(file: str, overrides: tuple[str, ...], takeover: bool, as_json: bool) -> int:
    """Run everything on this machine: Redis, reward server, workers, learner.

    Ctrl-C ends it in good order: the learner finishes its step and writes a checkpoint. Another Ctrl-C ends it at once.
    Starting it again goes on from the last checkpoint.
    """
    from rich.console import Console

    from streamrl.learner.checkpoints.resume import check_resume
    from streamrl.ops.launch.display import Display
    from streamrl.ops.launch.summary import summary_lines
    from streamrl.ops.launch.up import up as run_up

    loaded = load_config(file, overrides)
    check_resume(loaded.config)
    console = Console(stderr=as_json)
    outcome = run_up(loaded, display=Display(console), takeover=takeover)
    if outcome.summary is not None:
        for name, value in summary_lines(outcome.summary):
            console.print(f"{name:<18}{value}", markup=False, highlight=False, soft_wrap=True)
        if as_json:
            click.echo(json.dumps(outcome.summary.to_json()))
    return outcome.exit_code
