"""`streamrl config show|check`: what a configuration amounts to, and whether it can run; without torch or Redis."""

from __future__ import annotations

import json
from typing import Any

import click

from streamrl.cli.arguments import takes_config
from streamrl.config.check import check_config
from streamrl.config.dump import dump_config
from streamrl.config.files import check_files
from streamrl.config.load import load_config
from streamrl.transport.url import masked


@click.group()
def config() -> None:
    """Show or check a configuration."""


@config.command()
@takes_config
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every setting as the run would have it; what is not a default says where it was written."""
    loaded = load_config(file, overrides)
    if as_json:
        click.echo(json.dumps(_without_passwords(loaded.config.model_dump(mode="json"))))
    else:
        click.echo(masked(dump_config(loaded.config, loaded.origin)), nl=False)


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


def _without_passwords(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_passwords(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_passwords(one) for one in value]
    return masked(value) if isinstance(value, str) else value
