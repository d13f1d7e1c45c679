"""Workers whose engines compute something else than a plain forward pass of the same weights does: all of them, and the
run ends and says why; or one of two, and the run goes on with the other.

Learner and workers are the real ones. The engines hold the right tensors, whose digests agree, and give log-probs that
are half as large.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pytest
import redis

from streamrl.config import schema
from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.view import Cause
from streamrl.permissions import Permissions
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.workers.engines.transformers_engine import TransformersEngine
from streamrl.workers.main import Options
from streamrl.workers.service import serve
from tests.helpers import wait_until_async
from tests.integration.learner_world import make_run, output, running_learner

_SOON_S, _LATE_S = 20.0, 60.0  # weights.give_up_after_s: the run ends after 3/5 of it, 3 minutes by default

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]


def make_config(folder: Path, name: str, *, give_up_after_s: float) -> schema.Config:
    return make_run(
        folder,
        name=name,
        data=schema.Data(train=str(folder / "prompts.jsonl"), max_prompt_tokens=32),
        rewards={"form": schema.FunctionReward(type="function", target="regex_format", options={"pattern": "a"})},
        algorithm=schema.Algorithm(drop_zero_variance=False, mask_unfinished=False),
        training=schema.Training(groups_per_step=4, max_steps=3),
        weights=schema.Weights(dtype="float32", give_up_after_s=give_up_after_s),
        worker=schema.Worker(engine="transformers", threads=1, grace_s=1.0),
    )


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a copy of the model: engines that run what is there are wrong."""
    folder, right = tmp_path / "wrong", TransformersEngine.logprobs

    async def logprobs(self: TransformersEngine, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        found = await right(self, token_ids)
        return found / 2 if self._settings.model.path == str(folder) else found

    monkeypatch.setattr(TransformersEngine, "logprobs", logprobs)
    return folder


@asynccontextmanager
async def working(url: str, run: str, **models: str) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Workers by their names, until the block ends."""

    def leave(code: int) -> NoReturn:
        raise AssertionError(f"a worker did not stop when it was told to: {code}")

    stop = asyncio.Event()
    options = [
        Options(redis_url=url, run=run, worker=worker, permissions=Permissions(), model=model)
        for worker, model in models.items()
    ]
    tasks = [asyncio.create_task(serve(one, stop, leave=leave), name=one.worker) for one in options]
    try:
        yield tasks
    finally:
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)


def causes(client: redis.Redis, keys: Keys) -> dict[str, Cause]:
    """What `streamrl why` says, by name."""
    view = build_view(snapshot(client, keys), run_name=keys.name, server="here")
    return {cause.name: cause for cause in view.causes}


async def test_a_run_whose_workers_all_reject_the_weights_ends_within_its_patience_and_says_why(
    tmp_path: Path, wrong: Path, redis_url: str, client: redis.Redis, keys: Keys
) -> None:
    config = make_config(tmp_path, keys.name, give_up_after_s=_SOON_S)
    shutil.copytree(config.model.path, wrong)

    async def is_told() -> Cause | None:
        assert not any(worker.done() for worker in workers), workers
        return causes(client, keys).get("all_workers_reject")

    with running_learner(config, redis_url) as learner:
        async with working(redis_url, keys.name, a=str(wrong), b=str(wrong)) as workers:
            cause = await wait_until_async(is_told, description="`why` names the rejection", timeout_s=240)
            began = time.monotonic()
            assert await asyncio.to_thread(learner.wait, 60) == 1, output(config)
            lasted_s = time.monotonic() - began

    assert cause.level == "blocking"
    assert "all 2 of them" in cause.evidence
    error = json.loads((config.folder / "error.json").read_text())["error"]
    failed = causes(client, keys)["failed"].evidence
    for told in (error, failed):
        assert told.count("all 2 workers reject version 1.") == 1
    assert error in failed
    rejected = cause.evidence.partition("): ")[2]
    assert rejected in error, "with both numbers"
    assert lasted_s < _SOON_S
    run = snapshot(client, keys).run
    assert run is not None
    assert run.state == "failed"
    assert client.xlen(keys.groups("train")) == 0


async def test_a_run_of_which_one_worker_rejects_the_weights_goes_on_with_the_other(
    tmp_path: Path, wrong: Path, redis_url: str, client: redis.Redis, keys: Keys
) -> None:
    config = make_config(tmp_path, keys.name, give_up_after_s=_LATE_S)
    shutil.copytree(config.model.path, wrong)

    async def is_told() -> Cause | None:
        found = causes(client, keys)
        return found.get("all_workers_reject") or found.get("some_workers_reject")

    with running_learner(config, redis_url) as learner:
        async with working(redis_url, keys.name, bad=str(wrong)):
            await wait_until_async(is_told, description="`why` names the rejection", timeout_s=240)
            async with working(redis_url, keys.name, good=config.model.path):
                assert await asyncio.to_thread(learner.wait, 60) == 0, output(config)
            reports = {report.part: report.detail for report in snapshot(client, keys).reports}
    assert reports["worker/bad"]["rejected_version"]
    run = snapshot(client, keys).run
    assert run is not None
    assert run.state == "finished"
