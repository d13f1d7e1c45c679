"""`streamrl learn`: the torchrun line for a configuration, on one machine or as one of several.

The line is all there is to it: what is printed is what runs, in place of this process, so that signals and exit codes
are torchrun's own. Before that, whatever can be seen to be wrong is. Several machines run the same command, each for
itself, with the run's folder on a disk that all of them see.
"""

from __future__ import annotations

import os
import re
import shlex
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from streamrl.config import schema
from streamrl.config.check import check_config
from streamrl.config.dump import dump_config
from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS, check_files
from streamrl.errors import ConfigError, ResourceError
from streamrl.extras import check_learner
from streamrl.files import write_durably
from streamrl.ops.launch.parts import Cluster, RunFolder, holder_of_all, learner_command
from streamrl.ops.launch.preflight import check_redis
from streamrl.ops.launch.processes import Command
from streamrl.protocol.transport.address import PASSWORD, split_password
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import serving
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.lease import lease_holder

_NODES = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
_ENDPOINT = re.compile(r"[^:\s/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line, besides the configuration."""

    redis_url: str | None = None  # instead of the configuration's
    replay: Path | None = None  # a recording, instead of Redis
    nodes: str = "1"
    endpoint: str | None = None
    takeover: bool = False


def build(loaded: Loaded, wanted: Wanted) -> Command:
    """The line, after everything that can be looked at was; UserError for the first thing that is not right."""
    config = loaded.config
    check_config(config, loaded.origin)
    cluster = _cluster(wanted)
    url = None if wanted.replay is not None else _server(config, wanted)
    check_learner()
    check_files(config)
    folder = RunFolder(config.folder)
    address, password = (None, None) if url is None else split_password(url)
    command = learner_command(
        config,
        folder,
        redis_url=address,
        replay=wanted.replay,
        takeover=wanted.takeover,
        cluster=cluster,
        # Another one on this machine is a stranger, and waits or is refused; machines of one cluster are one learner.
        holder=None if cluster else f"learn-{uuid.uuid4().hex[:16]}",
    )
    # Every user of a machine sees the words of a command, and only its own user its environment.
    secrets = {} if password is None else {PASSWORD: password}
    return replace(command, environment={**command.environment, **secrets})


def joins(config: schema.Config, wanted: Wanted) -> bool:
    """Whether other machines of the same cluster are at work on the run."""
    cluster = _cluster(wanted)
    if cluster is None or wanted.replay is not None:
        return False
    with connect(_url(config, wanted), config.redis) as client:
        holder = lease_holder(client, Keys(config.name), give_up_after_s=config.redis.connect_timeout_s)
    return holder == holder_of_all(config, cluster)


def shown(command: Command) -> str:
    """As a shell would take it, but for a password."""
    values = {name: "***" if name == PASSWORD else shlex.quote(text) for name, text in command.environment.items()}
    variables = [f"{name}={value}" for name, value in values.items()]
    return " ".join([*variables, *(shlex.quote(word) for word in command.arguments)])


def prepare(config: schema.Config) -> None:
    """What the line refers to."""
    folder = RunFolder(config.folder)
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.learner_error.unlink(missing_ok=True)
    write_durably(folder.config, dump_config(config).encode())


def become(command: Command) -> NoReturn:
    """Run the line in this process's place."""
    os.execve(command.arguments[0], list(command.arguments), {**os.environ, **command.environment})


def _cluster(wanted: Wanted) -> Cluster | None:
    match = _NODES.fullmatch(wanted.nodes)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--nodes {wanted.nodes}: write how many machines, as 4, or a range, as 1:4")
    if wanted.endpoint is None:
        if int(match[2] or match[1]) > 1:
            raise ConfigError(
                f"--nodes {wanted.nodes}: machines must know where to meet; give all of them the same "
                "--rendezvous HOST:PORT, with the host of one of them and any port that is free there"
            )
        return None
    if not _ENDPOINT.fullmatch(wanted.endpoint):
        raise ConfigError(f"--rendezvous {wanted.endpoint}: write HOST:PORT, as trainer-0:29400")
    return Cluster(nodes=wanted.nodes, endpoint=wanted.endpoint)


def _server(config: schema.Config, wanted: Wanted) -> str:
    url = _url(config, wanted)
    with connect(url, config.redis) as client:
        check_redis(client, config)
    return url


def _url(config: schema.Config, wanted: Wanted) -> str:
    url = wanted.redis_url or config.redis.url
    if url != EMBEDDED_REDIS:
        return url
    found = serving(RunFolder(config.folder).redis)
    if found is None:
        raise ResourceError(
            "redis.url = 'embedded': that server comes with `streamrl up`, which is not running here; set "
            "redis.url=redis://HOST:6379 (workers must reach it too), or start everything with `streamrl up`"
        )
    return found
