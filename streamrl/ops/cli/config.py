"""`streamrl config show|check`: what a configuration amounts to, and whether it can run; without torch or Redis."""

from __future__ import annotations

import json

import click

from streamrl.config.check import check_config
from streamrl.config.load import dump_config, load_config
from streamrl.config.places import check_files
from streamrl.ops.cli.arguments import takes_config, takes_json
from streamrl.protocol.transport.address import masked


@click.group()
def config() -> None:
    """Show or check a configuration."""


@config.command()
@takes_config
@takes_json
def show(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every setting as the run would have it; what is not a default says where it was written."""
    loaded = load_config(file, overrides)
    config = loaded.config
    text = json.dumps(config.model_dump(mode="json")) if as_json else dump_config(config, loaded.origin)
    click.echo(masked(text.rstrip("\n")))


@config.command()
@takes_config
@click.option("--no-files", is_flag=True, help="Check settings only, not that data and models are there.")
def check(file: str, overrides: tuple[str, ...], no_files: bool) -> None:
    """Check settings against each other, read the prompts, look for the models: as `up` does before it starts."""
    loaded = load_config(file, overrides)
    check_config(loaded.config, loaded.origin)
    if not no_files:
        check_files(loaded.config)
    click.echo(f"{file}: good" + (" (files were not looked at)" if no_files else ""))
