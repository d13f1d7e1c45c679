"""`streamrl learn`: the learner alone, under torchrun, on one machine or on several."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from streamrl.config.changes import check_changes
from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from streamrl.ops.cli.arguments import takes_config
from streamrl.ops.launch.learn import Wanted, become, build, joins, prepare, shown
from streamrl.terminal import printable


@click.command()
@takes_config
@click.option("--redis", "redis_url", metavar="URL", help="The run's Redis, instead of redis.url.")
@click.option("--nodes", default="1", metavar="N|MIN:MAX", help="Machines that train together.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where these machines meet: one of them, any free port.")
@click.option("--takeover", is_flag=True, help="Replace a learner that still holds the run.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="DIR", help="Learn from a recording, without Redis.")
@click.option("--fork", "source", metavar="RUN[@STEP]", help="Begin this run with a checkpoint of another one.")
@click.option("--new-data", is_flag=True, help="With --fork: begin data.train, and the learning rate's schedule.")
@click.option("--dry-run", is_flag=True, help="Show the line, and what has changed since; run nothing.")
def learn(
    file: str,
    overrides: tuple[str, ...],
    redis_url: str | None,
    nodes: str,
    rendezvous: str | None,
    takeover: bool,
    replay: Path | None,
    source: str | None,
    new_data: bool,
    dry_run: bool,
) -> None:
    """Run the learner: builds the torchrun line for this configuration, shows it, and runs it.

    \b
        streamrl learn conf/mine.yaml redis.url=redis://host:6379
        streamrl learn conf/mine.yaml --dry-run
        streamrl learn conf/mine.yaml --nodes 1:4 --rendezvous trainer-0:29400      (the same on every machine)
        streamrl learn conf/mine.yaml name=again --replay recording
        streamrl learn conf/mine.yaml name=hotter optimizer.lr=2e-6 --fork runs/mine@120

    Each machine starts learner.processes ranks, one a GPU. Started again, it goes on from the newest checkpoint in the
    run's folder, dir/name, which all machines must see. Settings that a run may not change half-way are refused, with
    what to do instead. Workers come by themselves: `streamrl worker --redis URL --run NAME`.

    With --nodes MIN:MAX machines may leave and come; each time the ranks start again from the newest checkpoint. A
    machine that is told to end (SIGTERM) leaves in good order, after a checkpoint; `streamrl stop` ends the run. The
    machine of --rendezvous must stay.

    The exit code is 0 when the run has ended well, 2 after a mistake that only you can mend, else torchrun's. An error
    that no restart can mend is in the run's folder, in learner.error.
    """
    if replay is not None and redis_url is not None:
        raise ConfigError("--replay needs no Redis: give one of --replay and --redis")
    if replay is not None and source is not None:
        raise ConfigError("--fork begins a run that asks for groups of its own; a --replay begins with its recording")
    if new_data and source is None:
        raise ConfigError("--new-data is for a --fork; a run that goes on keeps its data")
    loaded = load_config(file, overrides)
    wanted = Wanted(redis_url=redis_url, replay=replay, nodes=nodes, endpoint=rendezvous, takeover=takeover)
    command = build(loaded, wanted)
    if source is not None:
        _fork(loaded.config, source, new_data=new_data, dry_run=dry_run)
    else:
        _check_resume(loaded.config, wanted)
        _show_changes(loaded.config)
    if not dry_run:
        prepare(loaded.config)
    click.echo(shown(command))
    if not dry_run:
        sys.stdout.flush()
        become(command)


def _check_resume(config: Config, wanted: Wanted) -> None:
    """A machine that joins others does not start the run."""
    from streamrl.learner.checkpoints.resume import check_resume

    if not config.checkpoint.resume and not joins(config, wanted):
        check_resume(config)


def _show_changes(config: Config) -> None:
    """Against the checkpoint that the run would go on from; refused ones end it here, before anything starts."""
    from streamrl.learner.checkpoints.resume import changed_since_checkpoint

    found = changed_since_checkpoint(config)
    check_changes(found, folder=str(config.folder))
    for change in found:
        click.echo(printable(f"changed since the checkpoint: {change}"), err=True)


def _fork(config: Config, source: str, *, new_data: bool, dry_run: bool) -> None:
    from streamrl.learner.checkpoints.resume import check_steps, find_checkpoint, fork

    checkpoint = find_checkpoint(source)
    check_steps(checkpoint, config.training)
    begins = f"run {config.name} begins with {checkpoint.folder}"
    if dry_run:
        click.echo(f"{begins} (not yet: --dry-run)", err=True)
        return
    fork(checkpoint, config.folder, new_data=new_data)
    click.echo(begins, err=True)
