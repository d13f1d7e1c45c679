"""The agent of the sessions bench: a given number of turns of a conversation, with a pause after each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx
from openai import AsyncOpenAI

GIVEN = "GO-ON."


async def talk(session: Any, row: Mapping[str, Any]) -> float:
    messages: list[Any] = [{"role": "user", "content": row["said"]}]
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=_connections())
    for turn in range(row["turns"]):
        if turn:
            await asyncio.sleep(row["pause_s"])
        answer = await client.chat.completions.create(model=session.model, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": GIVEN}]
    return 0.0


@cache
def _connections() -> httpx.AsyncClient:
    """Return a client shared by all rollouts of a process: creating one takes as long as a turn."""
    return httpx.AsyncClient(timeout=600.0)
