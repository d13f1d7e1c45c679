"""Arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """FILE [KEY.SUB=VALUE]...: the command is called with `file` and `overrides`, for `load_config`."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
    return click.argument("file", type=click.Path())(overrides(command))


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
