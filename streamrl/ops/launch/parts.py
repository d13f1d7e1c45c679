"""The parts of a run on this machine: their command lines and permissions, and the paths of its folder.

The operator who wrote the configuration also starts the workers here, so whatever it names (reward functions, reward
servers, the model) is permitted to them. Workers started elsewhere get no such permissions.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.config.placement import LEARNER, REWARD, Placement
from streamrl.config.places import granted
from streamrl.files import write_durably
from streamrl.host import usable_cores
from streamrl.interface import gloo_towards
from streamrl.ops.launch.processes import Command
from streamrl.protocol.transport.connection import check_server, connect
from streamrl.protocol.weights.stores import budget_in_redis

_THREADS = "OMP_NUM_THREADS"
_NEVER_S = 365 * 24 * 3600
_HOSTS_PORT = 9600  # of the first worker; that of each further one is one more
# Time for a rank to finish its step and write a checkpoint before torchrun kills it.
DRAIN_S = 300


class RunFolder:
    """Paths in a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the run's; that of the latest launch until a learner has taken the run
        self.redis = path / "redis"
        self.reward_url = path / "reward.url"
        self.reward_bound = path / "reward.bound"
        self.learner_error = path / "learner.error"
        self.launcher_error = path / "launcher.error"  # why the last launch ended, if a part could not go on
        self.summary = path / "summary.json"
        self.logs = path / "logs"

    def requested_config(self, holder: str) -> Path:
        """Return the file that this learner's ranks load at each start. No two learners share one: the second may be
        refused, and the ranks of the first restarted after that."""
        return self.path / f"asked-{holder}.yaml"

    def write_request(self, config: schema.Config, holder: str) -> None:
        """Write the requested configuration. The learner makes it the run's own when it takes the run."""
        text = dump_config(config).encode()
        write_durably(self.requested_config(holder), text)
        if not (self.config.exists() and (self.path / "terms").is_dir()):
            write_durably(self.config, text)


NO_PLACEMENT = Placement(shares={})


def reward_command(
    server: schema.OwnRewardServer, folder: RunFolder, *, port: int, placement: Placement = NO_PLACEMENT
) -> Command:
    weights = ",".join(map(str, server.attribute_weights))
    files = {"url_file": folder.reward_url, "bound_file": folder.reward_bound}
    options = server.model_dump(include=set(schema.RewardServer.model_fields))
    options |= {"port": port, "attribute_weights": weights, **files}
    # With =, since a mean may start with a minus sign.
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return Command(
        name=REWARD,
        arguments=(sys.executable, "-m", "streamrl.ops.cli.main", "reward", "serve", *arguments),
        log=folder.logs / "reward.log",
        environment=placement.environment(REWARD),
    )


def worker_command(
    config: schema.Config,
    folder: RunFolder,
    *,
    number: int,
    redis_url: str,
    reward_url: str | None,
    placement: Placement = NO_PLACEMENT,
) -> Command:
    name = f"worker/{number}"
    arguments = ["--redis", redis_url, "--run", config.name, "--worker-id", str(number), "--model", config.model.path]
    arguments += ["--log-file", str(folder.logs / f"worker-{number}.log")]
    permissions = granted(config)
    allowed = {
        "--allow-reward-code": permissions.reward_code,
        "--allow-reward-network": permissions.reward_network,
        "--allow-reward-env": permissions.reward_environment,
        "--allow-host": permissions.hosts,
    }
    arguments += [word for option, values in allowed.items() for value in values for word in (option, value)]
    if reward_url is not None:
        arguments += ["--local-reward-url", reward_url]
    if config.worker.engine == "vllm":
        arguments += ["--import-vllm"]
    if config.worker.hosts > 1:
        arguments += ["--hosts", f"0.0.0.0:{_HOSTS_PORT + number}"]
    if (fraction := placement.fraction(name)) is not None:
        arguments += ["--gpu-memory", f"{fraction:.3f}"]
    return Command(
        name=name,
        # vLLM's spawned processes import this module, and so apply `misfits`; a `__main__` module would be skipped.
        arguments=(sys.executable, "-m", "streamrl.ops.cli.main", "worker", *arguments),
        log=folder.logs / f"worker-{number}.out",
        environment=placement.environment(name),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Several machines that train together, with the same values on all of them."""

    nodes: str  # number of machines: "4", or "1:4" for a range
    endpoint: str  # HOST:PORT on one of them, for the rendezvous

    @property
    def is_elastic(self) -> bool:
        """Machines may leave and join."""
        minimum, _, maximum = self.nodes.partition(":")
        return maximum not in ("", minimum)

    @property
    def sizes(self) -> range:
        """The possible numbers of machines."""
        minimum, _, maximum = self.nodes.partition(":")
        return range(int(minimum), int(maximum or minimum) + 1)


def learner_command(
    config: schema.Config,
    folder: RunFolder,
    *,
    redis_url: str | None = None,
    replay: Path | None = None,
    takeover: bool = False,
    standby: bool = False,
    cluster: Cluster | None = None,
    holder: str | None = None,
    placement: Placement = NO_PLACEMENT,
) -> Command:
    """Build the learner's command. Groups come from Redis or from a recording; ranks are on this machine, or on
    several. `holder` is for callers without the folder's lock, who under its name would take over from its owner."""
    assert (redis_url is None) != (replay is None), "groups come either from Redis or from a recording"
    learner = config.learner
    holder = holder or (cluster_holder(config, cluster) if cluster else folder_holder(folder.path))
    agent = [
        f"--nnodes={cluster.nodes if cluster else 1}",
        f"--nproc-per-node={learner.processes}",
        f"--max-restarts={learner.max_restarts}",
        *rendezvous(cluster),
        f"--rdzv-id={holder}",
        f"--shutdown-timeout={DRAIN_S}",
    ]
    program = ["--config", str(folder.requested_config(holder))]
    program += [] if cluster else ["--own-config"]
    program += ["--redis", redis_url] if redis_url is not None else ["--replay", str(replay)]
    program += ["--takeover"] if takeover else []
    program += ["--standby"] if standby else []
    program += ["--elastic"] if cluster and cluster.is_elastic else []
    if (fraction := placement.fraction(LEARNER)) is not None:
        program += ["--gpu-memory", f"{fraction:.3f}"]
    program += ["--log-file", str(folder.logs / "learner-{rank}.log"), "--error-file", str(folder.learner_error)]
    # A store shared between rounds makes ranks read addresses of dead peers, and wait for them for ever.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **placement.environment(LEARNER)}
    environment |= gloo_towards(cluster.endpoint) if cluster else {}
    if threads := learner.threads or _threads(learner, placement):
        environment[_THREADS] = str(threads)
    return Command(
        name=LEARNER,
        arguments=(sys.executable, "-m", "streamrl.learner.process.agent", *agent, "--", *program),
        log=folder.logs / "learner.out",
        environment=environment,
    )


def rendezvous(cluster: Cluster | None) -> list[str]:
    """Return torchrun's options for how its agents meet.

    By default every restart waits half a minute for more machines, and 15 s for a dead one. The latter is three times
    the interval, by the observer's clock, so clocks must agree to within these 6 s.

    An agent alone meets itself in a file of its own: torch's TCP store would listen on all interfaces, ask nobody who
    they are, and unpickle what it is told. Nobody listens for its beats, each of which would lengthen that file.
    """
    if cluster is None:
        return [
            "--rdzv-backend=c10d",
            f"--rdzv-conf=store_type=file,last_call_timeout=1,keep_alive_interval={_NEVER_S}",
        ]
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={cluster.endpoint}",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=2",
    ]


def _threads(learner: schema.Learner, placement: Placement) -> int:
    """Return the CPU threads of each of several ranks that have GPUs; 0: torchrun's choice.

    That is one for each of several ranks. Without GPUs their passes and the workers share the cores; with GPUs a step's
    work on the host would have one core a rank: AdamW and sums of gradients with `model.masters: cpu`, and what is cast
    in order to be published. No GPU has run this.
    """
    share = placement.shares.get(LEARNER)
    if learner.processes == 1 or share is None or not share.gpus or _THREADS in os.environ:
        return 0
    return max(1, usable_cores() // learner.processes)


def cluster_holder(config: schema.Config, cluster: Cluster) -> str:
    """Return the learner's holder name, the same on each machine."""
    return f"learn-{hashlib.sha256(f'{config.name}:{cluster.endpoint}'.encode()).hexdigest()[:16]}"


def folder_holder(folder: Path) -> str:
    """Return the learner's holder name: one launcher at a time runs a folder, so its successor takes over at once."""
    location = f"{socket.gethostname()}:{os.path.realpath(folder)}"
    return f"up-{hashlib.sha256(location.encode()).hexdigest()[:16]}"


def check_redis(url: str, config: schema.Config) -> None:
    """Check that the server is suitable for a run, and has the memory that these settings may use."""
    with connect(url, config.redis) as client:
        check_server(
            client, max_backlog_bytes=config.redis.max_backlog_bytes, max_store_bytes=budget_in_redis(config.weights)
        )
