"""The command lines of a run's parts on this machine: who is started how, and with whose permission.

The operator who wrote the configuration file starts the workers too, so what the file names (reward functions, reward
servers, the model) is passed to them as their own word. Workers started elsewhere get nothing of the kind.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from streamrl.config import schema
from streamrl.config.places import reward_code, reward_hosts
from streamrl.files import LOCK
from streamrl.ops.launch.processes import Command

REWARD = "reward/0"
LEARNER = "learner"
# What a rank may take to finish its step and to write a checkpoint before torchrun kills it.
DRAIN_S = 300


class RunFolder:
    """Where things lie in a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.lock = path / LOCK
        self.redis = path / "redis"
        self.reward_url = path / "reward.url"
        self.learner_error = path / "learner.error"
        self.summary = path / "summary.json"
        self.logs = path / "logs"


def reward_command(server: schema.RewardServer, folder: RunFolder, *, port: int) -> Command:
    weights = ",".join(map(str, server.attribute_weights))
    options = server.model_dump() | {"port": port, "attribute_weights": weights, "url_file": folder.reward_url}
    # With =, since a mean may begin with a minus.
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return Command(
        name=REWARD,
        arguments=(sys.executable, "-m", "streamrl.ops.cli.main", "reward", "serve", *words),
        log=folder.logs / "reward.log",
    )


def worker_command(
    config: schema.Config, folder: RunFolder, *, number: int, redis_url: str, reward_url: str | None
) -> Command:
    words = ["--redis", redis_url, "--run", config.name, "--worker-id", str(number), "--model", config.model.path]
    words += ["--log-file", str(folder.logs / f"worker-{number}.log")]
    for target in reward_code(config):
        words += ["--allow-reward-code", target]
    for host in reward_hosts(config):
        words += ["--allow-host", host]
    if reward_url is not None:
        words += ["--local-reward-url", reward_url]
    return Command(
        name=f"worker/{number}",
        arguments=(sys.executable, "-m", "streamrl.workers", *words),
        log=folder.logs / f"worker-{number}.out",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Several machines that train together; the same on all of them."""

    nodes: str  # how many: "4", or "1:4" for any number between
    endpoint: str  # HOST:PORT on one of them, where the agents meet

    @property
    def is_elastic(self) -> bool:
        """Machines may leave and come."""
        least, _, most = self.nodes.partition(":")
        return most not in ("", least)


def learner_command(
    config: schema.Config,
    folder: RunFolder,
    *,
    redis_url: str | None = None,
    replay: Path | None = None,
    takeover: bool = False,
    cluster: Cluster | None = None,
    holder: str | None = None,
) -> Command:
    """The groups come from Redis or from a recording; the ranks are on this machine, or on several. `holder` is for who
    does not hold the folder's lock: under the folder's own name it would take over from whoever does."""
    assert (redis_url is None) != (replay is None), "a learner has one source of groups"
    learner = config.learner
    agent = [
        f"--nnodes={cluster.nodes if cluster else 1}",
        f"--nproc-per-node={learner.processes}",
        f"--max-restarts={learner.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={cluster.endpoint if cluster else '127.0.0.1:0'}",
        f"--rdzv-id={holder or (holder_of_all(config, cluster) if cluster else _holder(folder.path))}",
        # By default every restart waits half a minute for more machines, and 15 s for one that has died. That is three
        # times the interval, on the clock of whoever looks, so clocks must agree to within these 6 s.
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=2",
        f"--shutdown-timeout={DRAIN_S}",
    ]
    program = ["--config", str(folder.config)]
    program += ["--redis", redis_url] if redis_url is not None else ["--replay", str(replay)]
    program += ["--takeover"] if takeover else []
    program += ["--elastic"] if cluster and cluster.is_elastic else []
    program += ["--log-file", str(folder.logs / "learner-{rank}.log"), "--error-file", str(folder.learner_error)]
    # A store shared between rounds makes ranks read addresses of peers that are gone, and wait for them for ever.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if learner.threads:
        environment["OMP_NUM_THREADS"] = str(learner.threads)
    return Command(
        name=LEARNER,
        arguments=(sys.executable, "-m", "streamrl.learner.process.agent", *agent, "--", *program),
        log=folder.logs / "learner.out",
        environment=environment,
    )


def holder_of_all(config: schema.Config, cluster: Cluster) -> str:
    """Who the learner is, on whichever machine it is asked."""
    return f"learn-{hashlib.sha256(f'{config.name}:{cluster.endpoint}'.encode()).hexdigest()[:16]}"


def _holder(folder: Path) -> str:
    """Who the learner is to others: one launcher at a time runs a folder, so the next one takes over at once."""
    place = f"{socket.gethostname()}:{os.path.realpath(folder)}"
    return f"up-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
