"""The groups in the stream, as `top` and the dashboard read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
import redis.asyncio
from tokenizers import Tokenizer, models

from streamrl.monitor.rollouts import find_decoder, list_rollouts, open_rollout
from streamrl.transport.keys import Keys
from tests.redis.run_world import RunWorld


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    return RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)


def test_without_a_tokenizer_token_ids_stand_for_the_text() -> None:
    for config in ("", "{}", '{"model": {"path": "/nowhere"}}'):
        assert find_decoder(config)([1, 2]) == "1 2"


async def test_with_the_models_tokenizer_a_rollout_is_text(world: RunWorld, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({word: place for place, word in enumerate(["zero", "one", "two", "three"])})).save(
        str(tmp_path / "tokenizer.json")
    )
    world.learner.plan()
    await world.answer_all(failing=frozenset({2}))
    rollouts = list_rollouts(world.client, world.keys)
    assert [rollout.ticket for rollout in rollouts] == [5, 4, 3, 2, 1, 0]
    assert rollouts[3].error == "the engine said no"
    decode = find_decoder(json.dumps({"model": {"path": str(tmp_path)}}))
    opened = open_rollout(world.client, world.keys, rollouts[0].id, decode)
    assert opened is not None
    assert opened.prompt == "zero one two"
    first = opened.completions[0]
    assert (first.text, first.reward, dict(first.by_source)) == ("zero one two three", 0.0, {"exact": 0.0})
    assert first.versions == ("1.0",)


async def test_what_is_committed_or_forged_is_told_from_what_is_there(world: RunWorld) -> None:
    world.client.xadd(world.keys.groups("train"), {"n": 1, "h": b"\xff", "b": b""})
    assert list_rollouts(world.client, world.keys) == []
    [(entry_id, _)] = world.client.xrange(world.keys.groups("train"))  # type: ignore[misc]
    assert open_rollout(world.client, world.keys, entry_id.decode(), find_decoder("")) is None
    assert open_rollout(world.client, world.keys, "1-1", find_decoder("")) is None
