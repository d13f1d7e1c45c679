"""The agent that the bench of sessions plays: so many turns of a conversation, with a pause after each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

GIVEN = "GO ON. "


async def talk(session: Any, row: Mapping[str, Any]) -> float:
    messages: list[Any] = [{"role": "user", "content": row["said"]}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=600.0) as client:
        for turn in range(row["turns"]):
            if turn:
                await asyncio.sleep(row["pause_s"])
            answer = await client.chat.completions.create(model=session.model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": GIVEN}]
    return 0.0
