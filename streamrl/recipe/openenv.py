"""An environment on an OpenEnv server, over its WebSocket: one connection per rollout, as its own clients do.

    {"type": "reset" or "step", "data": {...}} ──► {"type": "observation", "data": {"observation", "reward", "done"}}

OpenEnv's package is not needed, and could not be installed beside vLLM: the two require different versions of `mcp`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

_MAX_BYTES = 1 << 20


class OpenEnv:
    def __init__(self, *, url: str, action: str = "message", observation: str = "") -> None:
        """The model's text becomes the action's field `action`; the model reads the observation's field `observation`,
        or the whole observation as JSON if that is empty."""
        scheme, separator, place = url.rstrip("/").partition("://")
        if not separator or scheme not in ("ws", "wss", "http", "https"):
            raise ValueError(f"url {url!r} is not a server address: must be ws://host:port")
        self._url = f"{'wss' if scheme in ('wss', 'https') else 'ws'}://{place}/ws"
        self._action, self._observation = action, observation
        self._connection: Any = None

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Start an episode. The row's field `openenv` is sent to the server: a seed, or which task to use."""
        try:
            from websockets.asyncio.client import connect
        except ImportError:
            raise ValueError("the environment openenv needs websockets: `pip install websockets`") from None
        self._connection = await connect(self._url, max_size=_MAX_BYTES, proxy=None)
        observed = await self._ask("reset", row.get("openenv", {}))
        return None if "messages" in row else self._text(observed)  # a chat prompt describes the task itself

    async def step(self, completion: str) -> tuple[str, float, bool]:
        observed = await self._ask("step", {self._action: completion})
        return self._text(observed), float(observed.get("reward") or 0.0), bool(observed.get("done"))

    async def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(Exception):
                await self._connection.send(json.dumps({"type": "close"}))
            await self._connection.close()

    async def _ask(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._connection.send(json.dumps({"type": what, "data": data}))
        answer = json.loads(await self._connection.recv())
        received: Mapping[str, Any] = answer.get("data") or {}
        if answer.get("type") != "observation":
            raise RuntimeError(f"the server answered {answer.get('type')!r}: {received.get('message', received)}")
        return received

    def _text(self, observed: Mapping[str, Any]) -> str:
        observation = observed.get("observation") or {}
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise ValueError(f"the observation has no field {self._observation!r}; it has: {', '.join(observation)}")
        return str(observation[self._observation])
