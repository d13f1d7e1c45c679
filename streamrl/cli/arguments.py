"""What several commands share: their arguments, and how they tell what they have found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from streamrl.terminal import printable

# The command is called with `overrides`, `as_json` and `timeout_s`.
takes_overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
takes_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """FILE [KEY.SUB=VALUE]...: the command is called with `file` and `overrides`, for `load_config`."""
    return click.argument("file", type=click.Path())(takes_overrides(command))


def takes_timeout(what: str) -> Callable[..., Any]:
    return click.option("--timeout-s", type=click.FloatRange(min=0), default=30.0, help=f"How long to {what}.")


def tell(told: Any, lines: Iterable[str], *, as_json: bool, indent: int | None = 2) -> None:
    """The one as JSON, or the others for people, to whose terminals other machines' names and errors may come."""
    for line in [json.dumps(told, indent=indent)] if as_json else map(printable, lines):
        click.echo(line)


class MovingLine:
    """A line on stderr that is written again and again; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            self._is_shown = True
            click.echo(f"\r{text}   ", nl=False, err=True)

    def end(self) -> None:
        if self._is_shown:
            click.echo(err=True)


class OutputFile(click.Path):
    """A file to be written, as a Path; asked for before the work whose outcome it shall hold."""

    def __init__(self, *, suffix: str = "") -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffix = suffix

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if not path.name.endswith(self._suffix):
            self.fail(f"{str(path)!r} must end in {self._suffix}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {str(path.parent)!r}", param, ctx)
        super().convert(value, param, ctx)
        return path
