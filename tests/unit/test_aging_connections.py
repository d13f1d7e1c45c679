"""Clients of a reward server that always have something to ask: a balancer gives them to servers that were added."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from streamrl.process import bind
from streamrl.web import AgingConnection
from streamrl.workers.reward_server.batcher import Batcher, ScoringModelDouble
from streamrl.workers.reward_server.server import RewardApp, _Server


class Old(AgingConnection):
    max_age_s = -1.0


@contextlib.asynccontextmanager
async def reward_server(connection: type[AgingConnection]) -> AsyncIterator[str]:
    listens = asyncio.Event()
    model = ScoringModelDouble()
    app = RewardApp(model, Batcher(model, max_delay_s=0.0, max_batch_tokens=1000), token=None)
    server = _Server(app, listens.set)
    assert server.config.http is AgingConnection
    server.config.http = connection
    bound = bind("127.0.0.1", 0, what="the test")
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    await asyncio.wait_for(listens.wait(), 60)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/score"
    server.should_exit = True
    await serving


@pytest.mark.parametrize(("connection", "num_connections"), [(AgingConnection, 1), (Old, 3)])
async def test_a_connection_closes_with_an_answer_once_it_is_old(
    connection: type[AgingConnection], num_connections: int
) -> None:
    ports = set()
    async with reward_server(connection) as url, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(3):
            async with client.stream("POST", url, json={"texts": ["a"]}) as answer:
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr")[1])
                assert (answer.status_code, await answer.aread()) == (200, b'{"rewards":[97.0]}')
    assert len(ports) == num_connections
