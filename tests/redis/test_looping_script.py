"""A worker's script that never ends stops its server for all runs, until an operator ends it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.acl import ROLES, Role, rules
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.helpers import wait_until


@pytest.mark.timeout(120)
def test_an_operator_ends_a_script_that_loops(tmp_path: Path, is_redis_7: bool) -> None:
    def as_user(role: Role, server: EmbeddedRedis) -> redis.Redis:
        socket = server.url.removeprefix("unix://")
        return redis.Redis(unix_socket_path=socket, username=role, password=f"of-{role}", protocol=2, retry=None)

    with EmbeddedRedis.start(tmp_path / "server") as server, ThreadPoolExecutor(1) as thread:
        with connect(server.url, schema.Redis()) as client:
            client.config_set("lua-time-limit", 50)  # milliseconds, then it answers others: that it is busy
            for role in ROLES:
                granted = rules(role, run="mine", selectors=is_redis_7).split()
                client.execute_command("ACL", "SETUSER", role, "reset", "on", f">of-{role}", *granted)
        with as_user("worker", server) as worker, as_user("monitor", server) as monitor:
            assert monitor.ping()
            looping = thread.submit(worker.eval, "while true do end", 0)
            try:
                wait_until(lambda: is_busy(monitor), description="the script loops")
                with pytest.raises(redis.exceptions.NoPermissionError):
                    monitor.script_kill()
                with as_user("operator", server) as operator:
                    assert operator.script_kill()
                with pytest.raises(redis.ResponseError, match="killed"):
                    looping.result(60)
                assert monitor.ping()
            finally:
                server.stop()


def is_busy(client: redis.Redis) -> bool:
    try:
        return not client.ping()
    except redis.exceptions.BusyLoadingError:
        return False
    except redis.ResponseError as error:
        return "BUSY" in str(error)
