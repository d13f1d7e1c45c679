"""Services of environments whose network a test meddles with, and a worker's client of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.remote import RemoteEnvironment, build_remote
from streamrl.workers.environments.server import EnvironmentApp

ONE, TWO = "http://one:1", "http://two:2"
Reply = httpx.Response | Exception


def echo(row: Mapping[str, Any], said: list[str]) -> Answer:
    return Answer(observation=f"{row['name']}: {said[-1]}", reward=len(said) / 2, done=said[-1] == "bye")


class Services:
    """Hosts with a server each, and what their networks do: `meddle` may answer, or lose an answer, in its stead."""

    def __init__(self, *hosts: str, token: str | None = None) -> None:
        self.token = token
        self.environments = {host: EnvironmentDouble(echo, opening="hi") for host in hosts}
        self.asked: list[tuple[str, str]] = []
        self.down: set[str] = set()
        self.meddle: Callable[[str, str, httpx.Response], Reply] = lambda host, path, answer: answer
        for host in hosts:
            self.begin_anew(host)

    def begin_anew(self, host: str) -> None:
        self.apps = {**getattr(self, "apps", {}), host: EnvironmentApp(self.environments[host], token=self.token)}

    def num_open(self) -> list[int]:
        return [environment.num_open for environment in self.environments.values()]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        if host in self.down:
            raise httpx.ConnectError("refused")
        transport = httpx.ASGITransport(self.apps[host].asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {name: value for name, value in request.headers.items() if name == "authorization"}
            answer = await client.post(path, content=request.content, headers=headers)
        meddled = self.meddle(host, path, httpx.Response(answer.status_code, content=answer.content))
        if isinstance(meddled, Exception):
            raise meddled
        return meddled


class HangsAtTheEnd(Services):
    """Does not answer when a rollout is closed."""

    num_cancelled = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/close":
            return await super().__call__(request)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@asynccontextmanager
async def played_by(services: Services, *urls: str, **settings: Any) -> AsyncIterator[RemoteEnvironment]:
    chosen = schema.Environment(urls=urls, **{"timeout_s": 5.0, "outage_s": 60.0, **settings})
    remote = build_remote(
        chosen, Permissions(hosts=("one", "two")), transport=httpx.MockTransport(services), first_pause_s=0.001
    )
    try:
        yield remote
    finally:
        await remote.close()
