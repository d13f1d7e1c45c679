"""`streamrl plot`: the curves of one or several runs, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from streamrl.errors import ConfigError, DataError
from streamrl.ops.cli.arguments import OutputFile, refuse, takes_server
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.runs import find_target, opened


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN_FOLDER]...")
@takes_server
@click.option("-o", "--output", type=OutputFile(suffix=".png"), help="Output file; default: NAME.png in this folder.")
def plot(folders: tuple[Path, ...], url: str | None, run: str | None, output: Path | None) -> None:
    """Draw reward, KL, lag, throughput, time, correction, loss and length of a run, or of several, into one PNG.

    \b
        streamrl plot runs/quickstart                     from the folder: every step, also without Redis
        streamrl plot runs/a runs/b                       one over the other, from their folders
        streamrl plot --redis redis://host:6379 --run big -o big.png
                                                          from Redis: recent steps in full, older ones thinned
    """
    from streamrl.ops.monitor.charts import save_report

    if len(folders) > 1:
        _plot_several(folders, url or run, output)
        return
    name, history = _read_history(folders[0] if folders else None, url, run)
    if not history.steps.records and not history.validations.records:
        raise DataError(f"run {name!r} has no metrics yet: its first step has not finished")
    output = output or Path(f"{name}.png")
    steps = history.steps.records
    save_report(output, history, title=f"{name}, {steps[-1].step if steps else 0} steps")
    click.echo(f"{output}: {len(steps)} steps, {len(history.validations.records)} validations")


def _plot_several(folders: Sequence[Path], redis_options: str | None, output: Path | None) -> None:
    from streamrl.ops.monitor.comparison import histories, save_overlay

    if redis_options is not None:
        raise ConfigError("several runs are plotted from their folders: leave out --redis and --run")
    runs = histories(folders)
    output = output or Path("-against-".join(Path(name).name for name in runs) + ".png")
    save_overlay(output, runs)
    steps = (f"{name} {len(history.steps.records)} steps" for name, history in runs.items())
    click.echo(f"{output}: {', '.join(steps)}")


def _read_history(folder: Path | None, url: str | None, run: str | None) -> tuple[str, History]:
    """Return the run's name and its history."""
    if folder is not None and url is None:
        refuse("run", because="only with --redis: a folder holds one run")
        if not (folder / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{folder} has no metrics.jsonl: it is not a run's folder, or the run has not finished a step yet"
            )
        return folder.resolve().name, History.read(folder)
    target = find_target(folder, url, run)
    history = History()
    with opened(target) as opened_run:
        if isinstance(opened_run, Remains):
            return opened_run.name, opened_run.history
        history.refresh(opened_run.client, opened_run.keys)
    return target.run, history
