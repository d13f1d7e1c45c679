"""`docs/rewards.md` and `docs/reward-services.md` as a reader follows them: the functions score, the settings load, the
service is asked.
"""

from __future__ import annotations

import asyncio
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.config.places import granted
from streamrl.permissions import Permissions
from streamrl.recipe.own import load_function
from streamrl.recipe.rewards import REWARDS
from streamrl.workers.rewards.build import build_rewards
from streamrl.workers.rewards.forms import FORMS
from streamrl.workers.rewards.functions import CONCURRENT_CALLS, build_function_reward
from streamrl.workers.rewards.http_client import build_http_reward
from tests.pages import ROOT, blocks, lay_out
from tests.tiny_rewards import make_item

PAGE, SERVICES = ROOT / "docs" / "rewards.md", ROOT / "docs" / "reward-services.md"
CONFIGURATIONS = [block.text for page in (PAGE, SERVICES) for block in blocks(page, "yaml")]
PLAIN = """
model: {path: model}
data: {train: prompts.jsonl}
validation: {every_steps: 0}
"""


@pytest.fixture(autouse=True)
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user works, with what the page has them write, and a judge's key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "key")
    lay_out(tmp_path, PAGE)


def configured(block: str) -> schema.Config:
    Path("run.yaml").write_text(PLAIN + block)
    loaded = load_config("run.yaml")
    check_config(loaded.config, loaded.origin)
    return loaded.config


@pytest.mark.parametrize("block", CONFIGURATIONS)
async def test_every_configuration_is_one_whose_rewards_begin(block: str) -> None:
    config = configured(block)
    rewards = build_rewards(config.rewards, granted(config), "http://127.0.0.1:9")
    await rewards.start()
    await rewards.close()


async def scored(target: str, completion: str, **settings: Any) -> float | None:
    source = schema.FunctionReward(type="function", target=target, **settings)
    reward = build_function_reward("mine", source, Permissions(reward_code=(target,)))
    try:
        await reward.start()
        return await reward.score(make_item(completion, answer="4", messages=[]))
    finally:
        await reward.close()


async def test_the_functions_of_the_page_score() -> None:
    assert await scored("my_rewards.py:near", "5", options={"scale": 5}) == 0.8
    assert await scored("my_service_reward.py:patient", "it is 4") == 1.0
    assert await scored("of_trl.py:right", "4") == 1.0
    assert await scored("of_trl.py:right", "5") == 0.0


async def test_the_service_of_the_page_scores(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    lay_out(tmp_path / "service", SERVICES)
    (block,) = [block for block in CONFIGURATIONS if "polite:" in block]
    source = configured(block).rewards["polite"]
    assert isinstance(source, schema.HttpReward)
    service = ThreadingHTTPServer(("127.0.0.1", 0), load_function("service/my_service.py:Service", {}))  # type: ignore[arg-type]
    thread = threading.Thread(target=service.serve_forever, daemon=True)
    thread.start()
    try:
        here = source.model_copy(update={"url": f"http://127.0.0.1:{service.server_port}"})
        reward = build_http_reward("polite", here, Permissions(hosts=("127.0.0.1",)), None)
        scores = await asyncio.gather(reward.score(make_item("now, please")), reward.score(make_item("now")))
        await reward.close()
    finally:
        await asyncio.to_thread(service.shutdown)
        service.server_close()
        thread.join()
    assert scores == [1.0, 0.0]


def test_the_pages_name_what_is_built_in_and_how_services_are_asked() -> None:
    text = PAGE.read_text() + SERVICES.read_text()
    assert all(f"`{name}`" in text for name in (*REWARDS, *FORMS))
    for form in FORMS.values():
        assert f"`POST {form.path}`" in text
    defaults = schema.FunctionReward.model_fields
    assert f"`timeout_s` ({defaults['timeout_s'].default:g})" in text
    assert f"`memory_mb` ({defaults['memory_mb'].default})" in text
    assert f"up to {CONCURRENT_CALLS} calls" in text
