"""A reward model on vLLM's own server is just a URL: the numbers are those that plain scoring gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.permissions import Permissions
from streamrl.workers.reward_server.model import RewardModel
from streamrl.workers.rewards.http_client import build_http_reward
from tests.served import Served
from tests.tiny_models import EOS, UNKNOWN, begin_all_with, make_tokenizer
from tests.tiny_rewards import make_item, make_reward_model

pytestmark = pytest.mark.long

TEXTS = ["12345", "678", "90 12"]
CHAT = f"{UNKNOWN}12345678{EOS}"  # its template wrote the first token, which the tokenizer would add too


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_reward_model(tmp_path_factory.mktemp("model") / "rm")
    tokenizer = make_tokenizer()
    begin_all_with(tokenizer, UNKNOWN)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vllm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--runner", "pooling", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager")
    with Served(model, logs=tmp_path_factory.mktemp("vllm"), options=options, by_itself=True) as server:
        yield server.url


@pytest.mark.parametrize("form", ["vllm-classify", "vllm-pooling"])
async def test_a_reward_model_on_vllm_scores_as_plain_scoring_does(vllm: str, model: Path, form: str) -> None:
    local = RewardModel.load(schema.RewardServer(model=str(model)))
    source = schema.HttpReward.model_validate({"type": "http", "url": vllm, "form": form})
    reward = build_http_reward("model", source, Permissions(hosts=("127.0.0.1",)), None)
    chat = replace(make_item("678", prompt=f"{UNKNOWN}12345", messages=[{"role": "user", "content": "12345"}]), end=EOS)
    items = [*(make_item(text, prompt="") for text in TEXTS), chat]
    scores = await asyncio.gather(*map(reward.score, items))
    await reward.close()
    rows = local.encode([*TEXTS, CHAT])
    assert [local.tokenizer.decode(row) for row in rows] == [*(f"{UNKNOWN}{text}" for text in TEXTS), CHAT]
    assert scores == pytest.approx(local.score(rows), abs=1e-4)
