"""`streamrl reward serve` as a process of its own: real HTTP on loopback, a real small model, the real client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.config import schema
from streamrl.errors import RewardOutage
from streamrl.permissions import Permissions
from streamrl.process import free_port
from streamrl.workers.reward_server.model import RewardModel
from streamrl.workers.rewards.http_client import HttpReward, build_http_reward
from tests.helpers import wait_until, wait_until_async
from tests.tiny_models import CHARACTERS, make_model
from tests.tiny_rewards import make_item, make_reward_model

START_TIMEOUT_S = 240.0  # torch and transformers are imported, on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    url: str
    process: subprocess.Popen[str]


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Serving]:
    url_file = folder / "url"
    url_file.unlink(missing_ok=True)
    process = command("serve", "--model", str(model), "--url-file", str(url_file), "--threads", "1", *options)
    try:
        wait_until(
            lambda: url_file.exists() or process.poll() is not None,
            description="the server says its URL",
            timeout_s=START_TIMEOUT_S,
        )
        assert url_file.exists(), process.communicate()
        yield Serving(url=url_file.read_text(), process=process)
    finally:
        process.kill()
        process.communicate()


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "streamrl.ops.cli.main", "reward", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def result_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what it printed and its errors; it is not left running if it takes too long."""
    try:
        return process.communicate(timeout=START_TIMEOUT_S)
    finally:
        process.kill()


def connect(url: str, **settings: Any) -> HttpReward:
    source = schema.HttpReward(type="http", url="local", **settings)
    return build_http_reward("mine", source, Permissions(), url)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("model") / "rm")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(model, tmp_path_factory.mktemp("server")) as running:
        yield running


async def test_256_concurrent_samples_get_what_single_scoring_gives(server: Serving, model: Path) -> None:
    order = random.Random(0)
    texts = ["".join(order.choices(CHARACTERS, k=order.randint(1, 300))) for _ in range(256)]
    local = RewardModel.load(schema.RewardServer(model=str(model)))
    expected = [local.score([row])[0] for row in local.encode(texts)]
    reward = connect(server.url)
    scores = await asyncio.gather(*(reward.score(make_item(text, prompt="")) for text in texts))
    await reward.close()
    assert scores == pytest.approx(expected, abs=1e-5)


def test_health_tells_of_the_model(server: Serving, model: Path) -> None:
    answer = httpx.get(f"{server.url}/health", trust_env=False)
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "model": str(model), "pending_rows": 0}


def test_a_port_that_is_taken_is_one_line_and_exit_code_2(server: Serving, model: Path) -> None:
    port = server.url.rpartition(":")[2]
    process = command("serve", "--model", str(model), "--port", port)
    _, errors = result_of(process)
    assert process.returncode == 2
    assert errors.splitlines() == [
        f"error: reward server: cannot take port {port} of 127.0.0.1: Address already in use; "
        "choose another one, or 0 for any free one"
    ]


@pytest.mark.parametrize("kind", ["no folder", "no reward head"])
def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_2(tmp_path: Path, kind: str) -> None:
    if kind == "no reward head":
        make_model(tmp_path / "model")
    process = command("serve", "--model", str(tmp_path / "model"))
    _, errors = result_of(process)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert str(tmp_path / "model") in errors


async def test_a_client_outlives_the_death_and_return_of_its_server(model: Path, tmp_path: Path) -> None:
    port = str(free_port("127.0.0.1"))
    with ExitStack() as servers:
        first = servers.enter_context(serving(model, tmp_path, "--port", port))
        reward = connect(first.url, attempts=50)
        before = await reward.score(make_item())
        first.process.kill()
        first.process.wait()
        asking = asyncio.create_task(reward.score(make_item()))
        await asyncio.to_thread(servers.enter_context, serving(model, tmp_path, "--port", port))
        assert await asyncio.wait_for(asking, 60) == before
        await reward.close()


async def test_sigterm_ends_the_server_after_it_answered_what_was_asked(model: Path, tmp_path: Path) -> None:
    # The delay holds the request back until the signal is there.
    with serving(model, tmp_path, "--max-delay-ms", "2000", "--max-batch-tokens", "32") as server:
        reward = connect(server.url, attempts=1)
        asking = await ask_and_wait(reward, server)
        server.process.send_signal(signal.SIGTERM)
        assert isinstance(await asyncio.wait_for(asking, 20), float)
        await reward.close()
        output, errors = await asyncio.to_thread(server.process.communicate)
        assert (server.process.returncode, errors) == (0, "")
        assert output == f"reward server: {model} at {server.url}\n"


async def test_a_second_signal_ends_the_server_at_once_and_whoever_waits_is_told_so(
    model: Path, tmp_path: Path
) -> None:
    with serving(model, tmp_path, "--max-delay-ms", "3600000", "--max-batch-tokens", "32") as server:
        reward = connect(server.url, outage_s=0.01)  # else it would wait for another server
        asking = await ask_and_wait(reward, server)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: not listens(server), description="it takes no new connections")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(RewardOutage, match=r"answered 503: .*the server is shutting down"):
            await asyncio.wait_for(asking, 60)
        await reward.close()
        _, errors = await asyncio.to_thread(server.process.communicate)
        assert (server.process.returncode, errors) == (0, "")


async def ask_and_wait(reward: HttpReward, server: Serving) -> asyncio.Task[float]:
    """A request whose row waits for others to share its batch."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        await reward.score(make_item("4" * 32))  # a full batch waits for no others; it proves the model's health
        asking = asyncio.create_task(reward.score(make_item()))

        async def row_waits() -> bool:
            return bool((await client.get("/health")).json()["pending_rows"])

        await wait_until_async(row_waits, description="the row waits for others")
    return asking


def listens(server: Serving) -> bool:
    host, _, port = server.url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_trained_model_is_served_behind_a_token(tmp_path: Path) -> None:
    order = random.Random(0)
    rows = [{"prompt": "say a: ", "chosen": "a" * n, "rejected": "b" * n} for n in order.choices(range(1, 9), k=200)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "token").write_text("secret\n")
    make_model(tmp_path / "base", hidden=32)
    training = command(
        *("train", "--model", str(tmp_path / "base"), "--pairs", str(tmp_path / "pairs.jsonl")),
        *("--output", str(tmp_path / "rm"), "--lr", "1e-3", "--epochs", "3", "--threads", "1"),
    )
    output, errors = result_of(training)
    assert (training.returncode, errors) == (0, "")
    assert "held-out examples correctly" in output.splitlines()[-1]
    with serving(tmp_path / "rm", tmp_path, "--token-file", str(tmp_path / "token")) as server:
        texts = {"texts": ["say a: aaaa", "say a: bbbb"]}
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.post("/score", json=texts).status_code == 401
            answer = client.post("/score", json=texts, headers={"authorization": "Bearer secret"})
    good, bad = answer.json()["rewards"]
    assert good > bad
