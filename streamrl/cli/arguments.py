"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def takes_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """FILE [KEY.SUB=VALUE]...: the command is called with `file` and `overrides`, for `load_config`."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
    return click.argument("file", type=click.Path())(overrides(command))
