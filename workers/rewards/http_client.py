"""Rewards from an HTTP service: many samples per request (`asking`), one number each; answers are not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx

from streamrl.config import schema
from streamrl.config.places import ADDRESS, LOCAL_REWARD_SERVER, split_address
from streamrl.errors import ConfigError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.asking import FIRST_PAUSE_S, Service
from streamrl.workers.rewards.base import ScoreItem, SourceHealth
from streamrl.workers.rewards.forms import FORMS, Form
from streamrl.workers.rewards.http_request import ask, make_client
from streamrl.workers.rewards.sandbox_fusion import ask_programs

MAX_ROWS = 64  # per request


def build_http_reward(
    name: str,
    source: schema.HttpReward,
    permissions: Permissions,
    local_reward_url: str | None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
) -> HttpReward:
    """Check the addresses and this worker's permission for their hosts; connects to nothing yet."""
    key, form = f"rewards.{name}", FORMS[source.form]
    client = make_client(
        source, key=key, timeout_s=source.timeout_s, transport=transport, max_connections=source.max_concurrency
    )
    urls = [_address(f"{key}.url", url, form, permissions, local_reward_url) for url in source.urls]
    return HttpReward(source, urls, client, first_pause_s=first_pause_s)


def _address(key: str, url: str, form: Form, permissions: Permissions, local_reward_url: str | None) -> str:
    if url == LOCAL_REWARD_SERVER:
        if local_reward_url is None:
            raise ConfigError(
                f"{key}: `local` needs the address of the reward server: start the worker with --local-reward-url "
                "URL (`streamrl up` passes it to its own workers)"
            )
        url = local_reward_url  # given on this worker's command line, so it needs no other permission
    else:
        check_host(key, url, permissions)
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + form.path


def check_host(key: str, url: str, permissions: Permissions) -> None:
    parts = split_address(url)
    if parts is None or parts.hostname is None or parts.query or parts.username is not None:
        raise ConfigError(f"{key}: {url!r} is not the address of a service; expected {ADDRESS}")
    names = {parts.hostname, f"[{parts.hostname}]"}  # an IPv6 address stands in brackets before a port
    allowed = {host.lower() for host in permissions.hosts}
    if not allowed & (names | {f"{name}:{parts.port}" for name in names}):
        raise ConfigError(
            f"{key}: this worker may not send samples to {parts.hostname!r}; to allow it, start the worker "
            f"with --allow-host {parts.hostname}"
        )


class HttpReward:
    """A source that asks one service with one or more replicas."""

    def __init__(
        self, source: schema.HttpReward, urls: Sequence[str], client: httpx.AsyncClient, *, first_pause_s: float
    ) -> None:
        self._source, self._client = source, client
        runs_programs = source.form == "sandbox-fusion"
        self._ask, max_rows = (ask_programs, 1) if runs_programs else (ask, MAX_ROWS)
        self._service = Service(
            urls,
            self._request,
            source,
            max_rows=max_rows,
            kind=lambda item: item.is_chat,
            first_pause_s=first_pause_s,
        )

    async def start(self) -> None:
        """Nothing to check: a server that is not up yet is an outage, not a user's mistake."""

    def health(self) -> SourceHealth:
        return self._service.health()

    async def score(self, item: ScoreItem) -> float:
        return await self._service.ask(item)

    async def close(self) -> None:
        await self._service.close()
        await self._client.aclose()

    async def _request(self, url: str, items: Sequence[ScoreItem]) -> list[float]:
        return await self._ask(self._client, self._source, url, items)
