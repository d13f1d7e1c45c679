"""What can be known to go wrong before anything is started, so that a mistake costs a second and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from streamrl.config.check import check_config
from streamrl.config.files import check_files
from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS, is_object_store
from streamrl.config.schema import Config, RewardServer
from streamrl.errors import ResourceError
from streamrl.transport.connection import check_server, connect
from streamrl.transport.embedded import find_server
from streamrl.weights.object_store import ObjectStore
from streamrl.weights.stores import budget_in_redis


def check_before_start(loaded: Loaded) -> None:
    """One UserError for the first thing that is not as the run needs it. Imports neither torch nor vLLM."""
    config = loaded.config
    check_config(config, loaded.origin)
    check_packages(config)
    if is_object_store(config.weights.store):
        ObjectStore.open(config.weights.store)
    check_files(config)
    if config.reward_server is not None and config.reward_server.port:
        _check_port(config.reward_server)
    if config.redis.url == EMBEDDED_REDIS:
        find_server()
    else:
        with connect(config.redis.url, config.redis) as client:
            check_server(
                client,
                max_backlog_bytes=config.redis.max_backlog_bytes,
                max_store_bytes=budget_in_redis(config.weights),
            )


def check_packages(config: Config) -> None:
    """That what this configuration needs is installed."""
    check_package("torch", "the learner", "learner")
    check_package("transformers", "the learner", "learner")
    if config.worker.count and config.worker.engine == "vllm":
        check_package("vllm", "worker.engine = 'vllm'", "worker-cpu", "worker-gpu")
    if config.reward_server is not None:
        check_package("uvicorn", "reward_server", "rewards")


def check_package(package: str, needed_by: str, *extras: str) -> None:
    if importlib.util.find_spec(package) is None:
        choices = " or ".join(f"`pip install 'streamrl[{extra}]'`" for extra in extras)
        raise ResourceError(f"{needed_by} needs the package {package}, which is not installed: {choices}")


def _check_port(server: RewardServer) -> None:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            reason = "it is taken" if error.errno == errno.EADDRINUSE else error.strerror
            raise ResourceError(
                f"reward_server.port = {server.port}: cannot listen there on {server.host}: {reason}; "
                "choose another, or 0 for any free one"
            ) from None


@contextlib.contextmanager
def only_one(lock: Path, name: str) -> Iterator[None]:
    """Inside, no other launcher runs this folder. The kernel frees the lock with the process, however that ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"the run {name!r} is live: another process (pid {_read_pid(descriptor)}) runs {lock.parent}; "
                "end it with Ctrl-C, or choose another name with name=..."
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _read_pid(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode() or "unknown"
