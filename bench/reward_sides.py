"""The two sides as processes, restarted for every round: the server as users start it, and its bare model.

Both start in parallel and then wait for requests; while one is measured, the other is idle. A side that does not start,
or ends early, raises ResourceError.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.http_client import HttpReward, build_http_reward

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 15.0


class Server:
    """The server, called through the workers' client from outside its event loop."""

    def __init__(self, runner: asyncio.Runner, url: str) -> None:
        self._runner = runner
        source = schema.HttpReward(type="http", url="local")
        self._reward: HttpReward = build_http_reward("bench", source, Permissions(), url)

    def score(self, texts: Sequence[str]) -> float:
        """Return the seconds for all texts, requested at once like samples that finish together."""
        began = time.perf_counter()
        self._runner.run(self._score(texts))
        return time.perf_counter() - began

    def close(self) -> None:
        self._runner.run(self._reward.close())

    async def _score(self, texts: Sequence[str]) -> None:
        await asyncio.gather(*(self._reward.score(_item(text)) for text in texts))


class Bare:
    """`bench.reward_model` as a program: the same model without a server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def forward(self, texts: Sequence[str], *, batch_tokens: int) -> float:
        """Return the seconds of the forward passes alone."""
        assert self._process.stdin is not None, "it was opened"
        assert self._process.stdout is not None, "it was opened"
        self._process.stdin.write(json.dumps({"texts": list(texts), "batch_tokens": batch_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ResourceError("the bare model's process ended early; see its output above")
        return float(answer)


@contextmanager
def running_bare(model: Path) -> Iterator[Bare]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.reward_model", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    try:
        yield Bare(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_server(model: Path, folder: Path, *, max_batch_tokens: int) -> Iterator[Server]:
    """Run the command that users start."""
    url_file, log = folder / "url", folder / "log"
    url_file.unlink(missing_ok=True)
    options = [f"--model={model}", f"--max-batch-tokens={max_batch_tokens}", f"--url-file={url_file}"]
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "reward", "serve", "--port=0", "--threads=1", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=_environment())
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not url_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ResourceError(f"the reward server did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.05)
        with asyncio.Runner() as runner:
            server = Server(runner, url_file.read_text())
            try:
                yield server
            finally:
                server.close()
    finally:
        process.terminate()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def _item(text: str) -> ScoreItem:
    return ScoreItem(prompt="", completion=text, token_ids=np.empty(0, dtype=np.int32))
