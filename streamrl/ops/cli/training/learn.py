"""`streamrl learn`: the learner alone, under torchrun, on one machine or as one of several.

It prints the torchrun command and replaces this process by it, so signals and exit codes are those of the agent
(`learner/process/agent.py`). Before that it checks everything that can be checked. Several machines run the same
command, each for itself, with the run's folder on a disk that all of them share.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from streamrl.config.check import check_config
from streamrl.config.files import check_files
from streamrl.config.layout import refuse_layout
from streamrl.config.load import Loaded, as_overrides, load_config
from streamrl.config.placement import Placement, place
from streamrl.config.places import EMBEDDED_REDIS
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, ResourceError
from streamrl.gpus import gpus_here
from streamrl.learner.checkpoints import resume
from streamrl.ops.cli.arguments import run_trials, takes_config
from streamrl.ops.cli.training.forks import check_fork, fork_from, takes_fork
from streamrl.ops.launch.parts import Cluster, RunFolder, check_redis, cluster_holder, learner_command
from streamrl.ops.launch.processes import Command
from streamrl.ops.monitor.doctor.requirements import check_learning
from streamrl.protocol.transport.address import PASSWORD, split_password
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import serving
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.lease import lease_holder
from streamrl.terminal import printable

_NODES = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
_ENDPOINT = re.compile(r"[^:\s/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


@click.command()
@takes_config
@click.option("--redis", "redis_url", metavar="URL", help="The run's Redis, instead of redis.url.")
@click.option("--nodes", "--nnodes", default="1", metavar="N|MIN:MAX", help="Number of machines, or a range.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks per machine: learner.processes.")
@click.option(
    "--rendezvous", metavar="HOST:PORT", help="Meeting point of the machines: one of them, and any free port."
)
@click.option("--takeover", is_flag=True, help="Replace the learner that holds the run.")
@click.option("--standby", is_flag=True, help="Wait while another learner holds the run, then take over.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="DIR", help="Train from a recording, without Redis.")
@takes_fork
@click.option(
    "--dry-run", is_flag=True, help="Only show the command and what has changed since the checkpoint. Needs no Redis."
)
def learn(
    file: str,
    overrides: tuple[str, ...],
    redis_url: str | None,
    nodes: str,
    nproc_per_node: int | None,
    rendezvous: str | None,
    takeover: bool,
    standby: bool,
    replay: Path | None,
    source: str | None,
    new_data: bool,
    dry_run: bool,
) -> None:
    """Run the learner: build the torchrun command for this configuration, show it, and run it.

    \b
        streamrl learn conf/mine.yaml redis.url=redis://host:6379
        streamrl learn conf/mine.yaml --dry-run
        streamrl learn conf/mine.yaml --nodes 1:4 --rendezvous trainer-0:29400      (the same on every machine)
        streamrl learn conf/mine.yaml name=again --replay recording
        streamrl learn conf/mine.yaml name=hotter optimizer.lr=2e-6 --fork runs/mine@120

    Each machine starts learner.processes ranks, one per GPU. Started again, it resumes from the newest checkpoint in
    the run's folder, dir/name, which all machines must see. Changed settings that a run cannot resume with are refused,
    with what to do instead. Start workers separately: `streamrl worker --redis URL --run NAME`.

    With --nodes MIN:MAX machines may leave and join; each time the ranks restart from the newest checkpoint. On SIGTERM
    a machine leaves cleanly, after a checkpoint; `streamrl stop` ends the run. The machine of --rendezvous must stay.
    The model must have room on the GPUs of MIN machines, with which a learner may begin or be left.

    A run has one learner. A second one waits for two lease times and exits if the first still holds the run; with
    --standby it keeps waiting and takes over when the first is gone. `streamrl stop` ends both. A learner that was
    replaced (--takeover) exits too; with --standby it waits again.

    The exit code is 0 if the run has ended or was stopped cleanly, also by SIGTERM; 76 if this machine was told to
    leave a run that continues without it (--nodes MIN:MAX); 2 after a mistake that only you can fix; otherwise
    torchrun's. learner.error in the run's folder has an error that a restart would not fix.
    """
    _check_options(redis_url, replay, source, takeover=takeover, standby=standby, new_data=new_data)
    loaded = _load(file, overrides, nproc_per_node, redis_url)
    config, cluster = loaded.config, _cluster(nodes, rendezvous)
    # A second learner on this machine must wait or be refused; machines of one cluster are one learner.
    holder = cluster_holder(config, cluster) if cluster else f"learn-{uuid.uuid4().hex[:16]}"
    check_config(config, loaded.origin)
    hosts = _numbers_of_hosts(config, cluster)
    url = None if replay is not None else redis_url or config.redis.url
    server = None if url is None else _reach(url, config, dry_run=dry_run)
    placement = Placement(shares={}) if dry_run else place(config, gpus_here(), "learner")
    command = _build(config, holder, server or url, replay, cluster, placement, takeover=takeover, standby=standby)
    if source is not None:
        fork_from(source, config, new_data=new_data, dry_run=dry_run)
    else:
        _check_resume(config, cluster, server)
        _show_changes(config)
    if dry_run:
        click.echo(_shown(command))
        click.echo("not to be run as it is: `streamrl learn` first writes the file that its --config names", err=True)
    else:
        _exec(loaded, holder, command, hosts=hosts)


def _numbers_of_hosts(config: Config, cluster: Cluster | None) -> range:
    """How many machines may learn together; ConfigError if the layout does not fit the ranks of some number."""
    hosts = cluster.sizes if cluster else range(1, 2)
    for num_hosts in hosts:
        refuse_layout(config.learner.layout, num_hosts * config.learner.processes)
    return hosts


def _load(file: str, overrides: Sequence[str], nproc_per_node: int | None, redis_url: str | None) -> Loaded:
    # Monitors find the server in the run's folder.
    server = None if redis_url is None else split_password(redis_url)[0]
    options = {"learner.processes": nproc_per_node, "redis.url": server}
    given = {key: value for key, value in options.items() if value is not None}
    return load_config(file, [*overrides, *as_overrides(given)])


def _exec(loaded: Loaded, holder: str, command: Command, *, hosts: range) -> NoReturn:
    """Replace this process by torchrun's agent."""
    run_trials(loaded, workers_are_here=False, hosts=hosts)
    _prepare(loaded.config, holder)
    click.echo(_shown(command))
    sys.stdout.flush()
    os.execve(command.arguments[0], list(command.arguments), {**os.environ, **command.environment})


def _check_options(
    redis_url: str | None, replay: Path | None, source: str | None, *, takeover: bool, standby: bool, new_data: bool
) -> None:
    """Raise ConfigError for contradictory options."""
    if replay is not None and redis_url is not None:
        raise ConfigError("--replay needs no Redis: give one of --replay and --redis")
    if replay is not None and source is not None:
        raise ConfigError(
            "--fork starts a run that generates its own groups; --replay takes them from a recording: give one of them"
        )
    if standby and takeover:
        raise ConfigError("--takeover replaces the learner that --standby waits for: give one of them")
    check_fork(source, new_data=new_data)


def _check_resume(config: Config, cluster: Cluster | None, server: str | None) -> None:
    """Check whether the run may start; a machine that joins others does not start it."""
    if not config.checkpoint.resume and not (cluster and server and _joins(config, cluster, server)):
        resume.check_resume(config)


def _show_changes(config: Config) -> None:
    """Print changes since the checkpoint that the run resumes from; refused ones raise before anything starts."""
    for change in resume.changed_since_checkpoint(config):
        click.echo(printable(f"changed since the checkpoint: {change}"), err=True)


def _reach(url: str, config: Config, *, dry_run: bool) -> str | None:
    """Return the URL of the run's Redis, after checking it; None if a dry run cannot reach it."""
    try:
        server = _serving(config) if url == EMBEDDED_REDIS else url
        if dry_run:
            connect(server, config.redis).close()
        else:
            _await_server(server, config)
    except ResourceError as error:
        if not dry_run:
            raise
        click.echo(printable(f"Redis was not checked (--dry-run): {error}"), err=True)
        return None
    check_redis(server, config)
    return server


def _await_server(server: str, config: Config) -> None:
    """Wait for Redis, which may be down or start after its learner. Exiting with code 2, after which nobody restarts a
    learner, would be wrong."""
    num_failures = 0

    def note(why: str) -> None:
        nonlocal num_failures
        if num_failures == 0:
            click.echo(printable(f"waiting for Redis: {why}"), err=True)
        num_failures += 1

    connect(server, config.redis, patience_s=config.redis.give_up_after_s, on_trouble=note).close()


def _build(
    config: Config,
    holder: str,
    redis_url: str | None,
    replay: Path | None,
    cluster: Cluster | None,
    placement: Placement,
    *,
    takeover: bool,
    standby: bool,
) -> Command:
    """Build the command, after all other checks; UserError for the first fault.

    Groups come from `replay`, a recording, or from `redis_url`.
    """
    address, password = (None, None) if redis_url is None else split_password(redis_url)
    check_learning(config)
    check_files(config)
    command = learner_command(
        config,
        RunFolder(config.folder),
        redis_url=address,
        replay=replay,
        takeover=takeover,
        standby=standby,
        cluster=cluster,
        placement=placement,
        holder=holder,
    )
    # All users of a machine can read a command line, but only its own user the environment.
    secrets = {} if password is None else {PASSWORD: password}
    return replace(command, environment={**command.environment, **secrets})


def _joins(config: Config, cluster: Cluster, server: str) -> bool:
    """Whether other machines of this cluster hold the run."""
    with connect(server, config.redis) as client:
        holder = lease_holder(client, Keys(config.name), give_up_after_s=config.redis.connect_timeout_s)
    return holder == cluster_holder(config, cluster)


def _shown(command: Command) -> str:
    """Format the command for a shell, with the password hidden."""
    values = {name: "***" if name == PASSWORD else shlex.quote(text) for name, text in command.environment.items()}
    variables = [f"{name}={value}" for name, value in values.items()]
    return " ".join([*variables, *(shlex.quote(word) for word in command.arguments)])


def _prepare(config: Config, holder: str) -> None:
    """Prepare the run's folder for the command."""
    folder = RunFolder(config.folder)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.learner_error.unlink(missing_ok=True)
    folder.write_request(config, holder)


def _cluster(nodes: str, endpoint: str | None) -> Cluster | None:
    """Parse --nodes and --rendezvous; None: this machine alone."""
    match = _NODES.fullmatch(nodes)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--nodes {nodes}: must be a number of machines, such as 4, or a range, such as 1:4")
    if endpoint is None:
        if int(match[2] or match[1]) > 1:
            raise ConfigError(
                f"--nodes {nodes}: machines need a meeting point; give all of them the same "
                "--rendezvous HOST:PORT, with the host of one of them and any port that is free there"
            )
        return None
    if not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"--rendezvous {endpoint}: must be HOST:PORT, such as trainer-0:29400")
    return Cluster(nodes=nodes, endpoint=endpoint)


def _serving(config: Config) -> str:
    url = serving(RunFolder(config.folder).redis)
    if url is None:
        raise ResourceError(
            "redis.url = 'embedded': that server is part of `streamrl up`, which is not running here; set "
            "redis.url=redis://HOST:6379 (workers must reach it too), or start everything with `streamrl up`"
        )
    return url
