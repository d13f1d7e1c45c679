"""Chooses and starts what plays a run's rollouts: the turns of an environment, or an agent with sessions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.permissions import Permissions
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.own import OwnEnvironment, build_children
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.sessions.trace import Played

LOOPBACK = ("127.0.0.1", 0)


class Plays(Protocol):
    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        """Play one rollout. SampleError concerns this rollout, EngineError all; RewardOutage is not its fault."""
        ...

    def outage(self) -> str | None:
        """Why no rollout can be played now."""
        ...


@contextlib.asynccontextmanager
async def playing(
    config: schema.Config, permissions: Permissions, model: ModelFacts, address: tuple[str, int] = LOOPBACK
) -> AsyncIterator[Plays | None]:
    """Yield a started player, or None if samples are single answers. Sessions are served at `address`."""
    settings = config.environment
    if settings is None:
        yield None
        return
    tail = Tail(model.tokenizer, date=config.data.date)
    if settings.target is None:
        from streamrl.workers.environments.remote import build_remote  # lazy: imports httpx

        remote = build_remote(settings, permissions)
        try:
            yield Player(remote, tail=tail, settings=settings)
        finally:
            await remote.close()
        return
    children = build_children(settings, permissions)
    try:
        await children.start()
        if not children.has_agent:
            yield Player(OwnEnvironment(children), tail=tail, settings=settings)
            return
        if not settings.network and ":" in address[0] and address[0] != "::":
            raise ConfigError(
                f"--sessions [{address[0]}]: an agent without a network reaches its session over IPv4 only; give an "
                "IPv4 address, or set environment.network: true"
            )
        from streamrl.workers.environments.agents import AgentPlayer  # lazy: imports starlette and uvicorn
        from streamrl.workers.sessions.session import Model
        from streamrl.workers.sessions.sessions import Sessions
        from streamrl.workers.sessions.tool_calls import make_parser

        with contextlib.closing(_Thread()) as thread:
            sessions = Sessions(
                Model(
                    facts=model,
                    parse=make_parser(settings.tool_parser, model.tokenizer),
                    settings=settings,
                    date=config.data.date,
                    max_length=min(config.data.max_prompt_tokens + settings.max_tokens, model.max_positions or 1 << 30),
                    thread=thread,
                )
            )
            async with sessions.listening(*address):
                children.reach(sessions.address)
                player = AgentPlayer(children, sessions, settings=settings)
                try:
                    yield player
                finally:
                    await player.close()
    finally:
        await children.close()


class _Thread(ThreadPoolExecutor):
    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="conversations")

    def close(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)
