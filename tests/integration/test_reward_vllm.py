"""A reward model on vLLM's own server is just a URL: the numbers are those that plain scoring gives."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.reward_server.model import RewardModel
from streamrl.workers.rewards.http_client import build_http_reward
from tests.helpers import wait_until
from tests.tiny_rewards import make_item, make_reward_model

pytestmark = pytest.mark.long

TEXTS = ["12345", "678", "90 12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("model") / "rm")


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    url, log = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("vllm") / "log"
    words = ["--model", str(model), "--runner", "pooling", "--host", "127.0.0.1", "--port", port]
    words += ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
    try:
        wait_until(lambda: server.poll() is not None or answers(url), description="vLLM serves", timeout_s=180)
        assert server.poll() is None, log.read_text()[-2000:]
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("form", ["vllm-classify", "vllm-pooling"])
async def test_a_reward_model_on_vllm_scores_as_plain_scoring_does(vllm: str, model: Path, form: str) -> None:
    local = RewardModel.load(schema.RewardServer(model=str(model)))
    source = schema.HttpReward.model_validate({"type": "http", "url": vllm, "form": form})
    reward = build_http_reward("model", source, Permissions(hosts=("127.0.0.1",)), None)
    scores = await asyncio.gather(*(reward.score(make_item(text, prompt="")) for text in TEXTS))
    await reward.close()
    assert scores == pytest.approx(local.score(local.encode(TEXTS)), abs=1e-4)
