"""T20: a worker with another tokenizer, weights that were published in another type, and an engine that takes in one
tensor permuted. No group that they made is trained, and of the weights none leaves the worker.

The digests of these weights agree; what shows is what the engine computes with.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

import pytest
import redis
import torch
from safetensors.torch import load_file, save_file

from streamrl.config import schema
from streamrl.config.engines import ENGINES, EngineEntry
from streamrl.errors import ConfigError
from streamrl.permissions import Permissions
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.versions import make_version
from streamrl.workers.engines.base import Load
from streamrl.workers.engines.transformers_engine import TransformersEngine
from streamrl.workers.main import Options
from streamrl.workers.service import serve
from tests.faults.harness import FaultWorld
from tests.faults.place import Place
from tests.faults.report import Row, note, report
from tests.faults.stand_in_worker import Delivery, Habits
from tests.helpers import wait_until_async
from tests.made_up_learner import EPOCH, MadeUpLearner
from tests.tiny_models import make_model

_PROMPTS = [f"say {number}:" for number in range(12)]

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", tied=False)


@pytest.fixture
def learner(client: redis.Redis, keys: Keys, model: Path) -> MadeUpLearner:
    config = schema.Config(
        name=keys.name,
        model=schema.Model(path=str(model)),
        data=schema.Data(train="prompts.jsonl", max_prompt_tokens=32),
        sampling=schema.Sampling(num_samples=2, max_tokens=16),
        rewards={"exact": schema.FunctionReward(type="function", target="exact_match")},
        weights=schema.Weights(dtype="float32"),
        worker=schema.Worker(engine="transformers", threads=1, grace_s=1.0),
    )
    return MadeUpLearner(client, keys, config)


@asynccontextmanager
async def working(url: str, run: str, *, model: Path) -> AsyncIterator[asyncio.Task[None]]:
    """A worker, until it is told to stop."""

    def leave(code: int) -> NoReturn:
        raise AssertionError(f"the worker did not stop when it was told to: {code}")

    stop = asyncio.Event()
    name = f"foreign-{os.getpid()}"  # the made-up learner's run is the same one wherever this is tried
    options = Options(redis_url=url, run=run, worker=name, permissions=Permissions(), model=str(model))
    task = asyncio.create_task(serve(options, stop, leave=leave), name="worker")
    try:
        yield task
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_with_another_tokenizer_ends_before_it_takes_a_ticket(
    learner: MadeUpLearner, model: Path, tmp_path: Path, redis_url: str, client: redis.Redis, keys: Keys
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    learner.publish(model)
    learner.issue(*_PROMPTS, num_samples=2)

    async with working(redis_url, keys.name, model=other) as worker, asyncio.timeout(60):
        with pytest.raises(ConfigError, match="another tokenizer"):
            await worker

    streams = snapshot(client, keys).streams["train"]
    note(Row(scenario="T20 tokenizer", injections=1, lost=0, twice=0, more={"wrong": streams.num_groups}))
    assert (streams.num_groups, streams.num_leased, streams.num_tickets) == (0, 0, len(_PROMPTS))


def rounded(model: Path, folder: Path) -> Path:
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


class PermutingEngine(TransformersEngine):
    """The rows of one matrix come in another order, at the first version."""

    async def load(self, load: Load) -> None:
        if load.version != make_version(EPOCH, 0):
            return await super().load(load)
        name = "model.layers.1.mlp.down_proj.weight"
        tensors = load_file(load.weights)
        permuted = load.weights.with_name("permuted.safetensors")
        save_file({**tensors, name: tensors[name].flip(0).contiguous()}, permuted)
        await super().load(replace(load, weights=permuted))
        return permuted.unlink()


@pytest.mark.parametrize("how", ["dtype", "permuted"])
async def test_no_group_of_spoilt_weights_leaves_a_worker_and_the_next_ones_serve_it(
    learner: MadeUpLearner,
    model: Path,
    tmp_path: Path,
    redis_url: str,
    client: redis.Redis,
    keys: Keys,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "permuted":
        entry = EngineEntry(f"{__name__}:{PermutingEngine.__name__}")
        monkeypatch.setitem(cast(dict[str, EngineEntry], ENGINES), "transformers", entry)
    learner.issue(*_PROMPTS, num_samples=2, fields={"answer": "4"})
    learner.publish(rounded(model, tmp_path / "spoilt") if how == "dtype" else model)

    async def is_refused() -> bool:
        assert not worker.done(), worker
        reports = snapshot(client, keys).reports
        return any("read back from the engine" in str(report.detail.get("rejected")) for report in reports)

    async with working(redis_url, keys.name, model=model) as worker, asyncio.timeout(90):
        await wait_until_async(is_refused, description="the worker refuses them", timeout_s=240)
        sound = learner.publish(model, anchor=True)
        groups = await asyncio.to_thread(learner.groups, len(_PROMPTS))

    wrong = sum(group.header.min_version < sound.version for group in groups)
    answered = Counter(group.header.ticket for group in groups)
    lost, twice = len(_PROMPTS) - len(answered), answered.total() - len(answered)
    note(Row(scenario=f"T20 {how}", injections=1, lost=lost, twice=twice, more={"wrong": wrong}))
    assert (wrong, lost, twice) == (0, 0, 0)


@pytest.fixture
def place(place: Place) -> Place:
    return replace(place, num_prompts=120)


def test_of_a_worker_that_owns_to_another_model_every_group_is_dropped_and_counted_exactly(world: FaultWorld) -> None:
    """Whatever made it answer tickets all the same."""
    learner = world.start_learner()
    sound, foreign = world.start_worker(name="sound"), world.start_worker(habits=Habits(fingerprint="another"))
    for part in (learner, sound, foreign):
        part.ends_with(0)

    made = {delivery.ticket for delivery in Delivery.all_in(foreign.output)}
    dropped = {ticket for ticket, ending in world.endings().items() if ending.outcome == "dropped/wrong_model"}
    audit = world.audit()
    report("T20 fingerprint", audit, injections=len(made), dropped=len(dropped), wrong=len(made - dropped))
    assert made
    assert dropped == made
    assert audit.dropped["wrong_model"] == len(made)
    assert audit.trained > 0
