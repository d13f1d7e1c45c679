"""Running a script: by its digest, and by its text when the server does not know it (yet, or any more)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Call:
    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]


def run(client: redis.Redis, call: Call) -> Any:
    script = call.script
    try:
        return client.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
    except redis.exceptions.NoScriptError:  # it did not run, so running it now is no repetition
        return client.eval(script.text, len(call.keys), *call.keys, *call.args)


async def run_async(client: redis.asyncio.Redis, call: Call) -> Any:
    script = call.script
    try:
        return await client.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
    except redis.exceptions.NoScriptError:
        return await client.eval(script.text, len(call.keys), *call.keys, *call.args)
