"""Judges programs with a sandbox service that speaks SandboxFusion's API, as other trainers use it: one request per
test.

    POST /run_code  {"code", "language": "python", "stdin", "run_timeout", "compile_timeout", "memory_limit_MB"}
    {"status": "Success" | "Failed" | "SandboxError", "message", "run_result":
        {"status": "Finished" | "TimeLimitExceeded" | "Error", "return_code", "execution_time", "stdout", "stderr"}}

A test that is code runs after the program; a marker printed at the very end, different in each request, shows that it
was reached. `SandboxError` or a malformed answer is the service's failure, which the client retries.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

import httpx

from streamrl.config import schema
from streamrl.errors import RewardError
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.code_tests import CodeCase, ProgramEnding, judge, score_of
from streamrl.workers.rewards.http_request import Body, RequestRefused, TryAgain, post

_MAX_ANSWER_BYTES = 8 << 20  # a program's output, which the service may not limit
_MAX_REASON_CHARS = 200


async def ask_programs(
    client: httpx.AsyncClient, source: schema.HttpReward, url: str, items: Sequence[ScoreItem]
) -> list[float]:
    """Return one number per item. Raises TryAgain or RequestRefused."""
    service = _FusionSandbox(client, source, url)
    try:
        judged = [await judge(item, source.tests, service, every=source.tests.partial) for item in items]
    except RewardError as error:  # a row without tests
        raise RequestRefused(str(error)) from None
    return [score_of(outcomes, partial=source.tests.partial) for outcomes in judged]


class _FusionSandbox:
    """One address of the service, as a sandbox."""

    def __init__(self, client: httpx.AsyncClient, source: schema.HttpReward, url: str) -> None:
        self._client, self._source, self._url = client, source, url

    async def run(self, program: str, case: CodeCase) -> ProgramEnding:
        tests, marker = self._source.tests, secrets.token_hex(8)
        code = program if not case.then else f"{program}\n\n{case.then}\n\nprint({marker!r}, flush=True)\n"
        question = {
            "code": code,
            "language": "python",
            "stdin": case.stdin,
            "run_timeout": tests.time_s,
            "compile_timeout": tests.time_s,
            "memory_limit_MB": tests.memory_mb,
        }
        body = await post(
            self._client, self._url, question, timeout_s=self._source.timeout_s, max_bytes=_MAX_ANSWER_BYTES
        )
        ending = _read(body, time_s=tests.time_s)
        if case.then and ending.ended == "done" and not ending.stdout.rstrip().endswith(marker):
            return ProgramEnding(ended="exited", why="ended itself before its test", seconds=ending.seconds)
        return ending


def _read(body: Body, *, time_s: float) -> ProgramEnding:
    try:
        answer: Any = json.loads(body.content)
        status, result = answer["status"], answer.get("run_result")
        if status == "SandboxError":
            raise TryAgain(f"answered SandboxError: {body.shown(str(answer.get('message')))}")
        ended, code = result["status"], result.get("return_code")
        stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
        seconds = float(result.get("execution_time") or 0.0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _no_result(body) from None
    if ended == "TimeLimitExceeded":
        return ProgramEnding(ended="time", why=f"took more than {time_s:g} s", seconds=seconds)
    if ended != "Finished" or type(code) is not int:
        raise _no_result(body)
    last = next(reversed(stderr.strip().splitlines()), "")[:_MAX_REASON_CHARS]
    why = "" if code == 0 else last or f"ended with status {code}"
    return ProgramEnding(ended="done" if code == 0 else "raised", why=why, stdout=stdout, seconds=seconds)


def _no_result(body: Body) -> TryAgain:
    return TryAgain(f"the answer has no run result: {body.shown()}", answered=True)
