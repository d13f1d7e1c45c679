"""A run on the real server: learners and workers that share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
import redis.asyncio

from streamrl.transport.keys import Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.worker import WorkerStream

UID = "uid"
LEASE_S = 0.3

MakeLearner = Callable[..., LearnerStream]
MakeWorker = Callable[..., WorkerStream]


@pytest.fixture
def make_learner(client: redis.Redis, keys: Keys) -> MakeLearner:
    """A learner that has claimed the run, unless `claim=False`."""

    def make(
        *,
        epoch: int = 1,
        holder: str = "job",
        uid: str = UID,
        lease_s: float = 30.0,
        claim: bool = True,
        of: Keys = keys,
    ) -> LearnerStream:
        stream = LearnerStream(
            client, of, run_uid=uid, epoch=epoch, holder=holder, lease_s=lease_s, give_up_after_s=5.0
        )
        if claim:
            stream.claim(config_json='{"name": "x"}', fingerprint="model", wait_s=0.0)
            stream.restore(cursor="0-0")
        return stream

    return make


@pytest.fixture
def learner(make_learner: MakeLearner) -> LearnerStream:
    return make_learner()


@pytest.fixture
def make_worker(async_client: redis.asyncio.Redis, keys: Keys) -> MakeWorker:
    def make(name: str = "w", *, lease_s: float = LEASE_S) -> WorkerStream:
        return WorkerStream(async_client, keys, worker=name, lease_s=lease_s, give_up_after_s=5.0)

    return make


@pytest.fixture
def worker(make_worker: MakeWorker) -> WorkerStream:
    return make_worker()
