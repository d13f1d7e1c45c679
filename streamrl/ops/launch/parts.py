"""The parts of a run on this machine: their command lines and permissions; its own reward server.

The operator who wrote the configuration also starts the workers here, so whatever it names (reward functions, reward
servers, the model) is permitted to them. Workers started elsewhere get no such permissions.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.config.placement import LEARNER, REWARD, Placement
from streamrl.config.places import granted
from streamrl.errors import PartError
from streamrl.files import write_durably
from streamrl.held_folders import scratch_folder
from streamrl.host import usable_cores
from streamrl.interface import gloo_towards
from streamrl.ops.launch.processes import Command, Process, SupervisedProcess, end_all, part_error
from streamrl.process import LOOPBACK
from streamrl.protocol.transport.connection import check_server, connect
from streamrl.protocol.weights.stores import budget_in_redis
from streamrl.telemetry.progress import Progress

_THREADS = "OMP_NUM_THREADS"
_HOSTS_PORT = 9600  # of the first worker; that of each further one is one more
_LOOK_EVERY_S = 0.2
_END_S = 10.0
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


_NO_PLACEMENT = Placement(shares={})


def reward_command(
    server: schema.OwnRewardServer, folder: RunFolder, *, port: int, placement: Placement = _NO_PLACEMENT
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
    placement: Placement = _NO_PLACEMENT,
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
    placement: Placement = _NO_PLACEMENT,
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
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={cluster.endpoint if cluster else '127.0.0.1:0'}",
        f"--rdzv-id={holder}",
        # By default every restart waits half a minute for more machines, and 15 s for a dead one. The latter is three
        # times the interval, by the observer's clock, so clocks must agree to within these 6 s.
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=2",
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


class RewardPart:
    """The run's own reward server, kept at one address for the life of the run. Workers wait only for that address, not
    for the model: they take no tickets until it answers. A first load that takes too long ends the run; a later one is
    only reported, since to workers it is an outage. This object reports for the server, which has no access to Redis.
    """

    def __init__(
        self,
        server: schema.OwnRewardServer,
        folder: RunFolder,
        *,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Command], Process] = Process,
        placement: Placement = _NO_PLACEMENT,
    ) -> None:
        self._command = partial(reward_command, server, folder, placement=placement)
        self._folder, self._notify, self._clock = folder, notify, clock
        self._start_timeout_s = server.start_timeout_s
        self.forget_address()
        self.progress = Progress(part=REWARD, role="reward")
        self.progress.working("load the model")
        self.supervised = SupervisedProcess(self._command(port=server.port), notify=notify, clock=clock, start=start)
        self.url: str | None = None  # set once its port is bound
        self.is_ready = False  # it has answered once
        self._ready_by = clock() + self._start_timeout_s

    def look(self) -> None:
        self.supervised.look(is_needed=True)
        if self.supervised.process.poll() is not None:
            self.progress.working("restart")
            self.forget_address()  # its successor writes it again
            self._ready_by = self._clock() + self._start_timeout_s
            return
        if self.url is None and self._folder.reward_bound.exists():
            self._note_bound(self._folder.reward_bound.read_text())
        if self._folder.reward_url.exists():
            self.is_ready = True
            self.progress.working("serve")
            self.progress.advanced(restarts=self.supervised.num_restarts)
        elif self._clock() > self._ready_by:
            self._report_late()

    def _report_late(self) -> None:
        late = (
            f"the reward server was not ready within reward_server.start_timeout_s={self._start_timeout_s:g} "
            f"(see {self.supervised.command.log}); if its model takes longer to load, raise that setting"
        )
        if not self.is_ready:
            raise PartError(late)
        self._ready_by = self._clock() + self._start_timeout_s
        self._notify(f"{late}; samples wait for it meanwhile")

    def _note_bound(self, url: str) -> None:
        # Workers keep this address, so a restart must use the same port.
        self.url = url
        self.supervised.command = self._command(port=urlsplit(url).port or 0)

    def forget_address(self) -> None:
        """Delete address files left by an earlier launcher, or for a later one."""
        for file in (self._folder.reward_url, self._folder.reward_bound):
            file.unlink(missing_ok=True)


@contextmanager
def reward_server(
    server: schema.OwnRewardServer,
    *,
    notify: Callable[[str], None],
    show: Callable[[str], None],
    start: Callable[[Command], Process] = Process,
) -> Iterator[RewardPart]:
    """Run a reward server outside of any run: on any free port, ready at once, ended with the context. `show` is called
    now and then with its loading time; if it cannot load, UserError or PartError."""
    with scratch_folder() as folder:
        local_server = server.model_copy(update={"host": LOOPBACK[0], "port": 0})
        part, began = RewardPart(local_server, RunFolder(folder), notify=notify, start=start), time.monotonic()
        try:
            while not part.is_ready:
                if part.supervised.process.poll() is not None:
                    raise part_error(part.supervised.process)
                part.look()
                show(f"loading the reward model {server.model}: {time.monotonic() - began:.0f} s")
                time.sleep(_LOOK_EVERY_S)
            yield part
        finally:
            end_all([part.supervised.process], within_s=_END_S)
