"""`--fork RUN[@STEP]` of the commands that start a run: it begins with a checkpoint of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from streamrl.config.schema import Config
from streamrl.errors import ConfigError


def takes_fork(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --fork and --new-data, passed as `source` and `new_data`."""
    source = click.option(
        "--fork", "source", metavar="RUN[@STEP]", help="Start this run from a checkpoint of another one."
    )
    new_data = click.option(
        "--new-data", is_flag=True, help="With --fork: restart data.train and the learning rate's schedule."
    )
    return source(new_data(command))


def check_fork(source: str | None, *, new_data: bool) -> None:
    """Raise ConfigError for contradictory options."""
    if new_data and source is None:
        raise ConfigError("--new-data needs --fork; a resumed run keeps its data")


def fork_from(source: str, config: Config, *, new_data: bool, dry_run: bool = False) -> None:
    """Create the folder of the run, with the checkpoint that it starts from, and say so."""
    from streamrl.learner.checkpoints import resume

    checkpoint = resume.find_checkpoint(source, digests=False)  # `fork` checks them once it has the files
    resume.check_steps(checkpoint, config.training)
    resume.check_model(checkpoint, config)
    message = f"run {config.name} starts from {checkpoint.folder}"
    if dry_run:
        click.echo(f"{message} (not yet: --dry-run)", err=True)
        return
    resume.fork(checkpoint, config.folder, new_data=new_data)
    click.echo(message, err=True)
