"""The reward client with a server that is a function, without a socket."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import httpx

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.rewards.http_client import HttpReward, build_http_reward
from tests.helpers import wait_until


def connect(answer: Callable[[httpx.Request], Any], *, first_pause_s: float = 0.001, **settings: Any) -> HttpReward:
    named = {"url": "http://reward:1", "attempts": 1, "timeout_s": 5.0, **settings}
    source = schema.HttpReward(type="http", **named)
    transport = httpx.MockTransport(answer)
    return build_http_reward(
        "mine", source, Permissions(hosts=("reward",)), None, transport=transport, first_pause_s=first_pause_s
    )


def lengths(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"rewards": [len(text) for text in json.loads(request.content)["texts"]]})


async def until(predicate: Callable[[], Any], description: str) -> Any:
    """`wait_until` without blocking the event loop."""
    return await asyncio.to_thread(functools.partial(wait_until, predicate, description=description))
