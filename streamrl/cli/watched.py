"""The run that a monitoring command looks at: its folder, or a server and a name. Quick, unlike `target`, which reads
the whole configuration of a run that is to be changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from streamrl.monitor.opening import URL_VARIABLE, find_watched


def watches_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """[RUN_FOLDER] --redis URL --run NAME: the command is called with `watched`."""

    @click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[RUN_FOLDER]")
    @click.option("--redis", "url", metavar="URL", help=f"The run's Redis; by default the folder's, or {URL_VARIABLE}.")
    @click.option("--run", metavar="NAME", help="The run's name; by default the folder's.")
    @functools.wraps(command)
    def with_run(folder: Path | None, url: str | None, run: str | None, **rest: Any) -> Any:
        return command(watched=find_watched(folder, url, run), **rest)

    return with_run
