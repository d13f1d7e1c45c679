"""T2: one in twenty replies of Redis is lost on its way. What was asked for took effect unknown to who asked."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import schema
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.keys import Keys
from tests.faults.report import report
from tests.proxy import Proxy
from tests.redis.run_world import RunWorld

NUM_PROMPTS = 200
SETTINGS = schema.Redis(reply_timeout_s=5.0)


async def test_with_one_in_twenty_replies_lost_nothing_is_lost_or_trained_twice(
    tmp_path: Path, redis_url: str, keys: Keys
) -> None:
    with Proxy(redis_url) as proxy, connect(proxy.url, SETTINGS) as client:
        async with connect_async(proxy.url, SETTINGS) as async_client:
            world = RunWorld(
                tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url, num_prompts=NUM_PROMPTS
            )
            proxy.loss = 0.05
            trained: list[int] = []
            while batch := await world.train_steps(5, failing=frozenset({4, 44, 144}), dull=frozenset({2, 92, 192})):
                trained += batch
                world.learner.commit()
                if len(trained) % 2:
                    world.restart()
            world.learner.commit()
            proxy.loss = 0.0
    audit = world.audit()
    report("T2", audit, injections=proxy.num_dropped)
    assert proxy.num_dropped > 20
    assert (audit.trained, audit.dead, audit.outstanding) == (NUM_PROMPTS - 6, 3, 0)
    assert len(trained) == len(set(trained)) == audit.trained
