"""An OpenAI-compatible judge service on a real socket: it scores by a rule, and misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.tasks import close_server
from streamrl.workers.rewards.base import Spend
from streamrl.workers.rewards.judge import JudgeOfGroups, JudgeReward, build_judge_reward

_MARKED = re.compile(r"--- (answer|first answer|second answer) (\w+) ---\n(.*?)\n--- end of \1 \2 ---", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    content: Any = ""  # of the message
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # replaces the chat completion
    ended: str = "stop"
    hangs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    at: float  # time.monotonic()
    number: int
    body: dict[str, Any]
    authorization: str | None
    path: str

    @property
    def text(self) -> str:
        text: str = self.body["messages"][0]["content"]
        return text

    @property
    def answers(self) -> list[str]:
        return [text for _, _, text in _MARKED.findall(self.text)]


def rating(answer: str) -> int:
    """The made-up judge's rating of an answer, from 1 to 10."""
    return 1 + sum(map(ord, answer)) % 10


def worth(answer: str) -> float:
    """The score for that rating."""
    return (rating(answer) - 1) / 9


def fair(asked: Asked) -> Reply:
    if len(asked.answers) == 1:
        return Reply(content=json.dumps({"score": rating(asked.answers[0])}))
    first, second = map(rating, asked.answers)
    better = "same" if first == second else "first" if first > second else "second"
    return Reply(content=json.dumps({"better": better}))


class Judges:
    """`at_least`: the number of concurrent requests before any is answered."""

    def __init__(self, behave: Callable[[Asked], Reply], *, at_least: int) -> None:
        self.url = ""
        self.asked: list[Asked] = []
        self.at_once = self.most_at_once = 0
        self._behave, self._at_least = behave, at_least
        self._enough, self._over = asyncio.Event(), asyncio.Event()
        self._talks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks[task] = writer
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                writer.write(await self._answer(first.split()[1], headers, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # closed by the client
        finally:
            del self._talks[task]
            writer.close()

    async def end(self) -> None:
        self._over.set()
        talks = dict(self._talks)
        for writer in talks.values():
            writer.close()
        await asyncio.gather(*talks)

    async def _answer(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        asked = Asked(
            at=time.monotonic(),
            number=len(self.asked),
            body=json.loads(body),
            authorization=headers.get("authorization"),
            path=path,
        )
        self.asked.append(asked)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.at_once >= self._at_least:
            self._enough.set()
        try:
            await self._enough.wait()
            return await self._reply(asked)
        finally:
            self.at_once -= 1

    async def _reply(self, asked: Asked) -> bytes:
        reply = self._behave(asked)
        if reply.hangs:
            await self._over.wait()
        choice = {"message": {"role": "assistant", "content": reply.content}, "finish_reason": reply.ended}
        completion = {"choices": [choice], "usage": {"total_tokens": 100}}
        body = json.dumps(completion).encode() if reply.body is None else reply.body
        headers = {**reply.headers, "content-length": str(len(body))}
        head = [f"HTTP/1.1 {reply.status} So", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*head, "", ""]).encode() + body


@asynccontextmanager
async def judges_serving(
    behave: Callable[[Asked], Reply] = fair, *, at_least: int = 1, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Judges]:
    judges = Judges(behave, at_least=at_least)
    server = await asyncio.start_server(judges.talk, "127.0.0.1", 0, backlog=128, ssl=tls)
    judges.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield judges
    finally:
        await close_server(server)
        await judges.end()
        await server.wait_closed()


def source_of(*urls: str, **settings: Any) -> schema.JudgeReward:
    judges = {f"judge{i}": {"url": url, "model": "wise"} for i, url in enumerate(urls)}
    return schema.JudgeReward.model_validate(
        {"type": "judge", "judges": judges, "rubric": "It is right.", "timeout_s": 5.0, **settings}
    )


def build(
    source: schema.JudgeReward, *, environment: tuple[str, ...] = (), spend: Spend | None = None
) -> JudgeReward | JudgeOfGroups:
    allowed = Permissions(hosts=("127.0.0.1",), reward_environment=environment)
    return build_judge_reward("mine", source, allowed, spend, first_pause_s=0.01)


def judge_of(*urls: str, spend: Spend | None = None, **settings: Any) -> JudgeReward:
    reward = build(source_of(*urls, **settings), spend=spend)
    assert isinstance(reward, JudgeReward)
    return reward


def judge_of_groups(*urls: str, **settings: Any) -> JudgeOfGroups:
    reward = build(source_of(*urls, form="pairwise", **settings))
    assert isinstance(reward, JudgeOfGroups)
    return reward
