"""A service of judges in OpenAI's form, on a real socket: it scores by a rule, and misbehaves as it is told to."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.rewards.judge import JudgeOfGroups, JudgeReward, build_judge_reward

_MARKED = re.compile(r"--- (answer|first answer|second answer) (\w+) ---\n(.*?)\n--- end of \1 \2 ---", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    content: Any = ""  # of the message
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # instead of a chat completion
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
    """What the made-up judge thinks of an answer, from 1 to 10."""
    return 1 + sum(map(ord, answer)) % 10


def fair(asked: Asked) -> Reply:
    if len(asked.answers) == 1:
        return Reply(content=json.dumps({"score": rating(asked.answers[0])}))
    first, second = map(rating, asked.answers)
    better = "same" if first == second else "first" if first > second else "second"
    return Reply(content=json.dumps({"better": better}))


class Judges(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behave: Callable[[Asked], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave = behave
        self.asked: list[Asked] = []
        self.at_once = self.most_at_once = 0
        self.latency_s = 0.0
        self.lock = threading.Lock()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Judges
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        world = self.server
        with world.lock:
            asked = Asked(
                at=time.monotonic(),
                number=len(world.asked),
                body=body,
                authorization=self.headers["authorization"],
                path=self.path,
            )
            world.asked.append(asked)
            world.at_once += 1
            world.most_at_once = max(world.most_at_once, world.at_once)
        try:
            world.over.wait(world.latency_s)
            self._reply(world.behave(asked))
        except OSError:
            self.close_connection = True  # it was given up
        finally:
            with world.lock:
                world.at_once -= 1

    def _reply(self, reply: Reply) -> None:
        if reply.hangs:
            self.server.over.wait(60)
            self.close_connection = True
            return
        choice = {"message": {"role": "assistant", "content": reply.content}, "finish_reason": reply.ended}
        completion = {"choices": [choice], "usage": {"total_tokens": 100}}
        body = json.dumps(completion).encode() if reply.body is None else reply.body
        self.send_response(reply.status)
        for name, value in {**reply.headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: Any) -> None:
        """Not on the tests' own output."""


@contextmanager
def judges_serving(behave: Callable[[Asked], Reply] = fair) -> Iterator[Judges]:
    with Judges(behave) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="judges")
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


def source_of(*urls: str, **settings: Any) -> schema.JudgeReward:
    judges = {f"judge{i}": {"url": url, "model": "wise"} for i, url in enumerate(urls)}
    return schema.JudgeReward.model_validate(
        {"type": "judge", "judges": judges, "rubric": "It is right.", "timeout_s": 5.0, **settings}
    )


def build(source: schema.JudgeReward, *, environment: tuple[str, ...] = ()) -> JudgeReward | JudgeOfGroups:
    allowed = Permissions(hosts=("127.0.0.1",), reward_environment=environment)
    return build_judge_reward("mine", source, allowed, first_pause_s=0.01)


def judge_of(*urls: str, **settings: Any) -> JudgeReward:
    reward = build(source_of(*urls, **settings))
    assert isinstance(reward, JudgeReward)
    return reward


def judge_of_groups(*urls: str, **settings: Any) -> JudgeOfGroups:
    reward = build(source_of(*urls, form="pairwise", **settings))
    assert isinstance(reward, JudgeOfGroups)
    return reward
