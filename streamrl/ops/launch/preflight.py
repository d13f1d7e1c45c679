"""What can be known to go wrong before anything is started, so that a mistake costs a second and leaves nothing."""

from __future__ import annotations

import redis

from streamrl.config.load import Loaded
from streamrl.config.places import EMBEDDED_REDIS
from streamrl.config.schema import Config
from streamrl.ops.monitor.doctor.musts import MUSTS
from streamrl.protocol.transport.connection import check_server, connect
from streamrl.protocol.transport.embedded import find_server
from streamrl.protocol.weights.stores import budget_in_redis


def check_before_start(loaded: Loaded) -> None:
    """One UserError for the first thing that is not as the run needs it. Imports neither torch nor vLLM."""
    for check in MUSTS.values():
        check(loaded)
    config = loaded.config
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
