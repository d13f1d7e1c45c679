"""What can be known to go wrong before anything is started, so that a mistake costs a second and leaves nothing."""

from __future__ import annotations

import redis

from streamrl.config.check import check_config
from streamrl.config.files import check_files
from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS, is_object_store
from streamrl.config.schema import Config
from streamrl.extras import need
from streamrl.ports import bind
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
        server = config.reward_server
        bind(server.host, server.port, what=f"reward_server.port = {server.port}").close()
    if config.redis.url == EMBEDDED_REDIS:
        find_server()
    else:
        with connect(config.redis.url, config.redis) as client:
            check_redis(client, config)


def check_redis(client: redis.Redis, config: Config) -> None:
    """That the server is one which a run can be on, and that it may hold what these settings allow."""
    check_server(
        client, max_backlog_bytes=config.redis.max_backlog_bytes, max_store_bytes=budget_in_redis(config.weights)
    )


def check_packages(config: Config) -> None:
    """That what this configuration needs is installed."""
    check_learner()
    if config.worker.count and config.worker.engine == "vllm":
        need("worker.engine = 'vllm'", "vllm", extra="worker-cpu", or_extra="worker-gpu")
    if config.reward_server is not None:
        need("reward_server", "starlette", "uvicorn", extra="rewards")


def check_learner() -> None:
    need("the learner", "torch", "transformers", extra="learner")
