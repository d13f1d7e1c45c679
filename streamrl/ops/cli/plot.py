"""`streamrl plot`: the curves of a run as a PNG, from its folder or from Redis."""

from __future__ import annotations

from pathlib import Path

import click

from streamrl.errors import ConfigError, DataError
from streamrl.ops.cli.arguments import OutputFile, takes_place
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.runs import find_target, opened


@click.command()
@takes_place
@click.option("-o", "--output", type=OutputFile(suffix=".png"), help="The file; by default NAME.png, here.")
def plot(folder: Path | None, url: str | None, run: str | None, output: Path | None) -> None:
    """Draw reward, KL, lag, throughput, time, correction, loss and length of a run into one PNG.

    \b
        streamrl plot runs/quickstart                     from the folder: every step, also without Redis
        streamrl plot --redis redis://host:6379 --run big -o big.png
                                                          from Redis: recent steps in full, older ones thinned
    """
    from streamrl.ops.monitor.charts import save_report

    name, history = _from_folder(folder) if folder is not None and url is None else _from_redis(folder, url, run)
    if not history.steps.records and not history.validations.records:
        raise DataError(f"nothing has been recorded of run {name!r} yet: its first step is still to come")
    output = output or Path(f"{name}.png")
    steps = history.steps.records
    save_report(output, history, title=f"{name}, {steps[-1].step if steps else 0} steps")
    click.echo(f"{output}: {len(steps)} steps, {len(history.validations.records)} validations")


def _from_folder(folder: Path) -> tuple[str, History]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no metrics.jsonl: it is not the folder of a run, or no step was made yet")
    return folder.resolve().name, History.read(folder)


def _from_redis(folder: Path | None, url: str | None, run: str | None) -> tuple[str, History]:
    target = find_target(folder, url, run)
    history = History()
    with opened(target) as there:
        history.refresh(there.client, there.keys)
    return target.run, history
