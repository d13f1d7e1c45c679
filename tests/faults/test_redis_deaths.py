"""T6: Redis is killed ten times under a run, and comes back with all that it wrote, or without the last second."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.errors import TransportError
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.keys import Keys
from tests.faults.redis_keeper import RedisKeeper
from tests.faults.report import report
from tests.redis.run_world import RunWorld

NUM_KILLS = 10
LEASE_S = 1.0
RECOVERY_S = 3.0
SETTINGS = schema.Redis(connect_timeout_s=5.0, reply_timeout_s=5.0)


@pytest.mark.parametrize("cut_s", [0.0, 1.0], ids=["all that was written is there", "the last second is lost"])
async def test_redis_dies_ten_times_and_the_run_goes_on(tmp_path: Path, cut_s: float) -> None:
    chance = random.Random(6)
    with RedisKeeper(tmp_path / "redis") as keeper, connect(keeper.url, SETTINGS) as client:
        async with connect_async(keeper.url, SETTINGS) as async_client:
            world = RunWorld(
                tmp_path,
                client=client,
                async_client=async_client,
                keys=Keys("run"),
                url=keeper.url,
                num_prompts=20_000,
                redis_forgets=cut_s > 0,
            )
            recoveries: list[float] = []
            with LeaseKeeper(world.learner.stream.renew, lease_s=LEASE_S).keeping():
                for kill in range(1, NUM_KILLS + 1):
                    until = time.monotonic() + chance.uniform(0.05, 0.25)
                    while time.monotonic() < until:
                        await work(world)
                    keeper.kill(cut_s=cut_s)
                    while keeper.num_kills < kill or not recoveries or len(recoveries) < kill:
                        if await work(world) and keeper.num_kills == kill:
                            recoveries.append(time.monotonic() - keeper.back_at[-1])
                await work(world)
            world.learner.stream.renew()
            world.learner.plan()
            world.learner.commit()
            audit = world.audit()
    report("T6 cut" if cut_s else "T6", audit, injections=NUM_KILLS, recovery_s=max(recoveries))
    assert statistics.median(recoveries) <= RECOVERY_S, "a single one may meet a busy machine"
    assert (keeper.num_bytes_cut > 0) == (cut_s > 0)


async def work(world: RunWorld) -> int:
    """A step and a checkpoint; how many groups were trained."""
    trained = await world.train_steps(1)
    try:
        world.learner.commit()
    except TransportError:
        return 0  # the next checkpoint tells Redis
    return len(trained)
