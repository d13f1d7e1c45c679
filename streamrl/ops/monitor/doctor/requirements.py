"""Requirements of a run: `streamrl up` stops at the first that is not met, `streamrl doctor` reports all.

Each raises UserError with the remedy. Requirements on Redis are in `transport.connection.server_faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from streamrl.config.check import check_config
from streamrl.config.engines import ENGINES
from streamrl.config.files import check_files
from streamrl.config.layout import refuse_layout
from streamrl.config.load import Loaded
from streamrl.config.placement import Part, num_workers, place
from streamrl.config.places import EMBEDDED_REDIS, is_object_store
from streamrl.config.routers import refuse_without_gpus
from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from streamrl.extras import check_learner, need
from streamrl.files import check_writable
from streamrl.gpus import gpus_here
from streamrl.ops.monitor.doctor.sizes import published_bytes
from streamrl.process import bind
from streamrl.protocol.weights.object_store import ObjectStore
from streamrl.protocol.weights.stores import budget_in_redis, refuse_too_large


def check_learning(config: Config) -> None:
    """Check that everything that the learner of this configuration needs is installed."""
    check_learner()
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config.metrics, name):
            need(f"metrics.{name} (unset it if unneeded)", package, extra="trackers")


def check_packages(config: Config, part: Part = "all") -> None:
    """Check that this configuration's packages are installed, and that workers can run here."""
    if part != "worker":
        check_learning(config)
    engine = ENGINES[config.worker.engine]
    if num_workers(config, part) and engine.package:
        need(f"worker.engine = {config.worker.engine!r}", engine.package, extra=engine.extra, or_extra=engine.or_extra)
    if num_workers(config, part):
        refuse_without_gpus(config, len(gpus_here()))
    if part == "all" and config.reward_server is not None:
        need("reward_server", "starlette", "uvicorn", extra="rewards")


def _store(loaded: Loaded) -> None:
    store, num_bytes = loaded.config.weights.store, published_bytes(loaded.config)
    if budget_in_redis(loaded.config.weights) and num_bytes:
        refuse_too_large(num_bytes, loaded.config.weights)
    if is_object_store(store):
        ObjectStore.open(store)
    elif store.startswith("file:"):
        check_writable(Path(store.removeprefix("file:")), what=f"weights.store = {store!r}")


def _port(loaded: Loaded) -> None:
    server = loaded.config.reward_server
    if server is not None and server.port:
        bind(server.host, server.port, what=f"reward_server.port = {server.port}").close()


def _placement(loaded: Loaded) -> None:
    worker = loaded.config.worker
    if worker.hosts > 1 and worker.count and loaded.config.redis.url == EMBEDDED_REDIS:
        raise ConfigError(
            f"worker.hosts = {worker.hosts}: an engine's other hosts cannot reach the Redis that `streamrl up` "
            "embeds; set redis.url to a server that all hosts can reach, or worker.hosts to 1"
        )
    place(loaded.config, gpus_here())


REQUIREMENTS: Mapping[str, Callable[[Loaded], object]] = {
    "settings": lambda loaded: check_config(loaded.config, loaded.origin),
    "layout": lambda loaded: refuse_layout(loaded.config.learner.layout, loaded.config.learner.processes),
    "packages": lambda loaded: check_packages(loaded.config),
    "weights store": _store,
    "run folder": lambda loaded: check_writable(loaded.config.folder, what=f"dir = {str(loaded.config.dir)!r}"),
    "files": lambda loaded: check_files(loaded.config),
    "reward port": _port,
    "placement": _placement,
}
