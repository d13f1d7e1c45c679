"""The reward server against its own model, asked directly: how much of the hardware's speed reaches the callers.

    texts ─► the workers' HTTP client ─► server, in a process of its own: tokenise, batch, forward ─► scores
    token ids, batched as well as can be ─► forward                                      (the comparison)

Both have one thread for their forward passes. The comparison is the best of several sizes of batches, with rows sorted
by length, so that hardly anything is padding; tokenising and building tensors are not in its time.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.measure import Rounds, Say, seconds
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.held_folder import scratch_folder
from workers.permissions import Permissions
from workers.rewards.base import ScoreItem
from workers.rewards.http_client import HttpReward, build_http_reward

if TYPE_CHECKING:
    from bench.reward_model import BareModel

_SHORTEST, _LONGEST = 16, 512  # characters, a token each
_SERVED_BATCH_TOKENS = 4096
_BARE_BATCH_TOKENS = (1024, 2048, 4096, 8192)
_START_TIMEOUT_S = 60.0


def bench(*, quick: bool, say: Say) -> list[Line]:
    from bench.reward_model import ALPHABET, BareModel, write_reward_model  # torch: only when it is asked

    rng = random.Random(0)
    lengths = [rng.randint(_SHORTEST, _LONGEST) for _ in range(64 if quick else 512)]
    texts = ["".join(rng.choices(ALPHABET, k=length)) for length in lengths]
    with scratch_folder() as folder:
        write_reward_model(folder / "model")
        say("starting the server")
        with _served(folder) as url, asyncio.Runner() as runner:
            server = _Caller(runner, url)
            bare = BareModel(folder / "model")
            server.score(texts[:8])  # connections are open, the model is warm
            say(f"{len(texts)} texts at once")
            lines = _saturation(server, bare, texts, num_rounds=3 if quick else 5, say=say)
            say("one text at a time")
            lines += _lone_requests(server, bare, texts[0][:256], num_rounds=20 if quick else 100)
            server.close()
    return lines


def _saturation(server: _Caller, bare: BareModel, texts: Sequence[str], *, num_rounds: int, say: Say) -> list[Line]:
    bare_s = {limit: _time_bare(bare, texts, limit) for limit in _BARE_BATCH_TOKENS}
    best = min(bare_s, key=lambda limit: bare_s[limit])
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: len(texts) / _time_bare(bare, texts, best),
        "server": lambda: len(texts) / seconds(partial(server.score, texts)),
    }
    rounds = Rounds(ways, num_rounds=num_rounds, say=say)
    return [
        Bar(
            name="server / best bare forward, saturated",
            value=rounds.ratio("server", to="bare"),
            unit="x",
            goal=0.85,
            better="higher",
        ),
        Fact(name="server", value=rounds.median("server"), unit="texts/s"),
        Fact(name="best bare forward", value=rounds.median("bare"), unit="texts/s"),
        Fact(name="tokens of a batch in it", value=best, unit=""),
    ]


def _time_bare(bare: BareModel, texts: Sequence[str], batch_tokens: int) -> float:
    batches = bare.batches(texts, max_tokens=batch_tokens)
    return seconds(partial(bare.forward, batches))


def _lone_requests(server: _Caller, bare: BareModel, text: str, *, num_rounds: int) -> list[Line]:
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: 1000 * _time_bare(bare, [text], _SERVED_BATCH_TOKENS),
        "lone": lambda: 1000 * seconds(partial(server.score, [text])),
    }
    rounds = Rounds(ways, num_rounds=num_rounds)
    max_delay_ms = schema.RewardServer.model_fields["max_delay_ms"].default
    over = rounds.median("lone") - rounds.median("bare") - max_delay_ms
    return [
        Bar(name="lone request over bare + max delay, p50", value=over, unit="ms", goal=5.0, better="lower"),
        Fact(name="lone request, p50", value=rounds.median("lone"), unit="ms"),
        Fact(name="bare forward of it, p50", value=rounds.median("bare"), unit="ms"),
    ]


class _Caller:
    """The client that workers use, called from outside of its loop."""

    def __init__(self, runner: asyncio.Runner, url: str) -> None:
        self._runner = runner
        source = schema.HttpReward(type="http", url="local")
        self._reward: HttpReward = build_http_reward("bench", source, Permissions(), url)

    def score(self, texts: Sequence[str]) -> None:
        """All at once, as many samples that finish together."""
        self._runner.run(self._score(texts))

    def close(self) -> None:
        self._runner.run(self._reward.close())

    async def _score(self, texts: Sequence[str]) -> None:
        await asyncio.gather(*(self._reward.score(_item(text)) for text in texts))


def _item(text: str) -> ScoreItem:
    none = np.empty(0, dtype=np.int32)
    return ScoreItem(prompt="", completion=text, prompt_ids=none, token_ids=none, fields={})


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The command that users start; its URL."""
    url_file, log = folder / "url", folder / "log"
    options = [f"--model={folder / 'model'}", f"--max-batch-tokens={_SERVED_BATCH_TOKENS}", f"--url-file={url_file}"]
    command = [sys.executable, "-m", "streamrl.cli.main", "reward", "serve", "--port=0", "--threads=1", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not url_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ResourceError(f"the reward server did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.05)
        yield url_file.read_text()
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
