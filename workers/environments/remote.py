"""Rollouts played by an HTTP service: one address, or several that are replicas of each other.

    POST /reset  {"row": {...}}                      {"id": "...", "observation": "..." or null}
    POST /step   {"id", "turn", "completion"}        {"observation": "..." or null, "reward": 0.5, "done": false}
    POST /close  {"id"}                              {}

    begin ──► any healthy replica; if none, wait up to `outage_s` ──► RewardOutage: the ticket goes back
    step  ──► only the replica that began it ──┬─ reply lost: retry with the same turn, which is played once
                                               ├─ still too late, malformed or a 500 after ATTEMPTS: this sample fails
                                               └─ replica gone, or it answers nobody, so its rollouts are lost: this
                                                  sample fails

If the whole service is gone, the rollout's ticket goes back instead, as in an outage: a restart of the service fails
no prompt. Answers are not trusted, like those of reward services: time, size and form are checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping
from typing import Any

import httpx

from streamrl.config import schema
from streamrl.errors import RewardOutage, SampleError
from streamrl.permissions import Permissions
from streamrl.tasks import cancel_all
from streamrl.workers.environments.base import MAX_ANSWER_BYTES, Answer, Episode, read_answer, read_text
from streamrl.workers.rewards.asking import FIRST_PAUSE_S
from streamrl.workers.rewards.http_client import check_host
from streamrl.workers.rewards.http_request import RequestRefused, TryAgain, make_client, post
from streamrl.workers.rewards.replicas import Replica, Replicas

ATTEMPTS = 5  # failed attempts per call: those that reached a replica, and for a step all of them
_LONGEST_PAUSE_S = 5.0
CLOSE_S = 5.0  # for closing one rollout
_LEAVE_S = 1.0  # for closing all that are left when the worker ends, within its grace period


def build_remote(
    settings: schema.Environment,
    permissions: Permissions,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
) -> RemoteEnvironment:
    """Check the addresses and this worker's permission for their hosts; connects to nothing yet."""
    for url in settings.urls:
        check_host("environment.urls", url, permissions)
    client = make_client(settings, key="environment", timeout_s=settings.timeout_s, transport=transport)
    return RemoteEnvironment(settings, client, first_pause_s=first_pause_s)


class RemoteEnvironment:
    def __init__(self, settings: schema.Environment, client: httpx.AsyncClient, *, first_pause_s: float) -> None:
        self._settings, self._client, self._first_pause_s = settings, client, first_pause_s
        self._replicas = Replicas([url.rstrip("/") for url in settings.urls], first_pause_s=first_pause_s)
        self._closing: set[asyncio.Task[None]] = set()
        self._lost_since: float | None = None  # first lost rollout since one last ended in order

    async def start(self) -> None:
        """Nothing to check: a service that is not up yet is an outage, not a user's mistake."""

    def outage(self) -> str | None:
        return self._replicas.outage

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.outage_s
        last: Replica | None = None
        attempts, call = 0, object()
        while attempts < ATTEMPTS:
            if last is not None and self._replicas.num_well:
                await self._pause(attempts)
            replica = await self._replicas.acquire(avoid=last, until=until)
            if replica is None:
                waited = f"no replica of the environment answered for {self._settings.outage_s:g} s"
                raise RewardOutage(f"{waited}: {self._replicas.last_errors}")
            num_answered = replica.num_answered
            try:
                answer = await self.ask(replica, "reset", {"row": dict(row)})
                return _RemoteEpisode(self, replica, *_opening(answer))
            except TryAgain as error:
                last, reason = replica, f"{replica.url}: {error}"
                attempts += _blames_row(error, replica, call, others_answered=replica.num_answered > num_answered)
            except RequestRefused as error:
                raise SampleError(f"the environment failed in reset: {error}") from None
        raise SampleError(f"the environment failed in reset: {reason} ({attempts} attempts)")

    async def step(self, replica: Replica, question: Mapping[str, Any]) -> Answer:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.outage_s
        attempts, call, reason, rest_s, blames_row = 0, object(), "", 0.0, False
        while attempts < ATTEMPTS and loop.time() < until:
            if reason:
                await self._pause(attempts, after_s=min(rest_s, until - loop.time()))
            self._replicas.stay(replica)
            num_answered = replica.num_answered
            try:
                return _read_step(await self.ask(replica, "step", question))
            except TryAgain as error:
                reason, rest_s = str(error), error.rest_s or 0.0
                attempts += error.rest_s is None
                blames_row = _blames_row(error, replica, call, others_answered=replica.num_answered > num_answered)
            except RequestRefused as error:
                if not error.gone:
                    raise SampleError(f"the environment failed in step: {error}") from None
                reason, blames_row = str(error), False
                break
        if blames_row:
            raise SampleError(f"the environment failed in step: {replica.url}: {reason} ({attempts} attempts)")
        raise self._lost(f"the rollout was lost with its replica: {replica.url}: {reason}")

    async def ask(self, replica: Replica, what: str, question: Mapping[str, Any]) -> Mapping[str, Any]:
        url, timeout_s = f"{replica.url}/{what}", self._settings.timeout_s
        with self._replicas.asking(replica):
            body = await post(self._client, url, question, timeout_s=timeout_s, max_bytes=MAX_ANSWER_BYTES)
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(answer := json.loads(body.content), dict):
                    return answer
            raise TryAgain(f"the answer is not a JSON object: {body.shown()}", answered=True)

    def ended_in_order(self) -> None:
        """Note that the service keeps its rollouts again."""
        self._lost_since = None

    def forget(self, replica: Replica, number: str) -> None:
        """Close the rollout in the background; the service also drops idle rollouts by itself."""
        closing = asyncio.create_task(self._close_at(replica, number), name=f"close rollout {number}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        if self._closing:
            await asyncio.wait(self._closing, timeout=_LEAVE_S)
        await cancel_all(list(self._closing))
        await self._client.aclose()

    async def _close_at(self, replica: Replica, number: str) -> None:
        with contextlib.suppress(TryAgain, RequestRefused):
            question = {"id": number}
            await post(self._client, f"{replica.url}/close", question, timeout_s=CLOSE_S, max_bytes=MAX_ANSWER_BYTES)

    def _lost(self, reason: str) -> Exception:
        """Return the error for a lost rollout. While no replica keeps its rollouts, and for less than `outage_s`, no
        sample is at fault."""
        now = asyncio.get_running_loop().time()
        self._lost_since = now if self._lost_since is None else self._lost_since
        is_total = len(self._replicas) == 1 or not self._replicas.num_well
        returns_ticket = is_total and now - self._lost_since < self._settings.outage_s
        return RewardOutage(reason) if returns_ticket else SampleError(reason)

    async def _pause(self, attempts: int, *, after_s: float = 0.0) -> None:
        longest_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(attempts, 10))
        await asyncio.sleep(after_s + longest_s * random.uniform(0.5, 1.0))


class _RemoteEpisode:
    def __init__(self, environment: RemoteEnvironment, replica: Replica, number: str, opening: str) -> None:
        self.opening = opening
        self._environment, self._replica, self._number = environment, replica, number
        self._turn = self._num_answered = 0

    async def step(self, completion: str) -> Answer:
        self._turn += 1
        question = {"id": self._number, "turn": self._turn, "completion": completion}
        answer = await self._environment.step(self._replica, question)
        self._num_answered += 1
        return answer

    async def close(self) -> None:
        # A rollout cut off by `max_turns` or `max_tokens` ends in order too, and its last answer is not `done`.
        if self._num_answered == self._turn > 0:
            self._environment.ended_in_order()
        self._environment.forget(self._replica, self._number)


def _blames_row(error: TryAgain, replica: Replica, call: object, *, others_answered: bool) -> bool:
    """Return whether the row is to blame for a failed attempt of this call. If other calls get answers there meanwhile,
    it is. If not, a gateway without a backend says nothing about it, nor does a replica that leaves others without an
    answer, too: whether at once or one after the other, since it last answered."""
    if not error.reached or error.rest_s is not None:
        return False
    if others_answered or error.answered:
        return True
    if error.backend_down:
        return False
    replica.unanswered.add(call)
    return replica.unanswered == {call}


def _opening(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Return (the rollout's id, the environment's first observation)."""
    try:
        if number := read_text(answer.get("id"), "id"):
            return number, read_text(answer.get("observation"))
    except ValueError as error:
        raise TryAgain(str(error), answered=True) from None
    raise TryAgain("the answer has no 'id'", answered=True)


def _read_step(answer: Mapping[str, Any]) -> Answer:
    try:
        return read_answer(answer.get("observation"), answer.get("reward"), answer.get("done"))
    except ValueError as error:
        raise TryAgain(str(error), answered=True) from None
