"""The groups in the stream, as `top` and the dashboard read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
import redis.asyncio
from tokenizers import Tokenizer, models

from streamrl.ops.monitor.rollouts import find_decoder_of_run, list_rollouts, open_rollout, rollouts_of
from streamrl.ops.monitor.runs import Opened
from streamrl.ops.record.export import to_json
from streamrl.protocol.transport.keys import Keys
from tests.redis.run_world import RunWorld
from tests.run_folders import make_folder


@pytest.fixture
def world(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> RunWorld:
    return RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url)


def test_without_a_tokenizer_there_are_no_words(client: redis.Redis, keys: Keys) -> None:
    for config in ("", "{}", '{"model": {"path": "/nowhere"}}'):
        client.hset(keys.meta, "config", config)
        assert find_decoder_of_run(client, keys) is None


async def test_with_the_models_tokenizer_a_rollout_is_text(world: RunWorld, tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({word: place for place, word in enumerate(["zero", "one", "two", "three"])})).save(
        str(tmp_path / "tokenizer.json")
    )
    world.learner.plan()
    await world.answer_all(failing=frozenset({2}))
    rollouts = list_rollouts(world.client, world.keys)
    assert [rollout.ticket for rollout in rollouts] == [5, 4, 3, 2, 1, 0]
    assert rollouts[3].error == "the engine said no"
    world.client.hset(world.keys.meta, "config", json.dumps({"model": {"path": str(tmp_path)}}))
    found = open_rollout(world.client, world.keys, rollouts[0].id)
    assert found is not None
    told = to_json(*found, find_decoder_of_run(world.client, world.keys))
    assert told["prompt"] == "zero one two"
    first = told["samples"][0]
    assert (first["text"], first["reward"], first["rewards"]) == ("zero one two three", 0.0, {"exact": 0.0})
    assert [span["version"] for span in first["spans"]] == ["1.0"]


async def test_what_is_committed_or_forged_is_told_from_what_is_there(world: RunWorld) -> None:
    world.client.xadd(world.keys.groups("train"), {"n": 1, "h": b"\xff", "b": b""})
    assert list_rollouts(world.client, world.keys) == []
    [(entry_id, _)] = world.client.xrange(world.keys.groups("train"))  # type: ignore[misc]
    assert open_rollout(world.client, world.keys, entry_id.decode()) is None
    assert open_rollout(world.client, world.keys, "1-1") is None


async def test_what_the_stream_has_forgotten_is_read_from_the_folder(
    world: RunWorld, tmp_path: Path, client: redis.Redis, keys: Keys
) -> None:
    there = Opened(client=client, keys=keys, server="here", folder=make_folder(tmp_path, "kept", "finished"))
    rollouts = rollouts_of(there)
    assert [rollout.ticket for rollout in rollouts.latest()][:2] == [111, 110]
    opened = rollouts.to_json("11-111")
    assert opened is not None
    assert opened["prompt"] == "what is 11?"
    assert "what is 11?" in "\n".join(map(str, rollouts.lines("11-111", width=80, colour=False)))
    assert rollouts.to_json("12-112") is None
    world.learner.plan()
    await world.answer_all()
    assert 111 not in [rollout.ticket for rollout in rollouts.latest()]
