"""What workers spend together, such as the tokens of a judge's budget."""

from __future__ import annotations

import pytest
import redis

from streamrl.errors import RunGone
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import remove_run
from streamrl.protocol.transport.worker import WorkerStream
from tests.redis.conftest import MakeWorker


async def test_each_worker_hears_what_all_have_spent(learner: LearnerStream, make_worker: MakeWorker) -> None:
    one, other = make_worker("one"), make_worker("other")
    assert [await one.spend("tokens", 5), await other.spend("tokens", 7), await other.spend("time", 1)] == [5, 12, 1]
    assert await make_worker("late").spend("tokens", 0) == 12


async def test_of_a_run_that_was_removed_nothing_is_left_behind_by_who_still_spends(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    await worker.spend("tokens", 5)
    remove_run(client, keys)
    with pytest.raises(RunGone):
        await worker.spend("tokens", 5)
    assert not client.exists(keys.counters)
