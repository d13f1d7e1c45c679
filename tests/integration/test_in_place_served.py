"""Deltas in their places while samples are in flight, in an engine of its own process; and one that fails half-way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from streamrl.config import schema
from streamrl.errors import EngineError
from streamrl.protocol.weights.changes import Changed, Elements
from streamrl.workers.engines.base import EngineSettings, Generated, Load, SampleRequest
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.engines.vllm.in_place import InPlace
from tests.helpers import wait_until_async
from tests.integration.in_place import IDS, Chain
from tests.tiny_models import make_model
from tests.worker_world import worker_config

NUM_DELTAS = 5
NUM_TOKENS = 400

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


class Scene:
    def __init__(self, folder: Path) -> None:
        model = make_model(folder / "model", dtype=torch.bfloat16)
        self.chain = Chain(model, folder / "mirror", "bfloat16")
        config = worker_config(threads=1, engine_args={"kv_cache_memory_bytes": 64 << 20}).model_copy(
            update={
                "weights": schema.Weights(dtype="bfloat16"),
                "sampling": schema.Sampling(max_tokens=NUM_TOKENS),
            }
        )
        facts = read_model(str(model), trust_remote_code=False)
        self.engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))

    async def load(self) -> int:
        """All of it."""
        version = self.chain.mirror.version
        await self.engine.load(Load(weights=self.chain.mirror.path, version=version, step=0))
        return version

    async def load_delta(self, changed: Changed | None = None) -> int:
        manifest, its_own = self.chain.next()
        await self.engine.load(
            Load(weights=self.chain.mirror.path, version=manifest.version, step=0, changed=changed or its_own)
        )
        return manifest.version

    def sample(self, number: int) -> asyncio.Task[Generated]:
        sampling = schema.Sampling(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
        request = SampleRequest(request_id=f"sample-{number}", prompt_ids=IDS[:9], sampling=sampling)
        return asyncio.create_task(self.engine.generate(request), name=request.request_id)

    async def made(self, num_tokens: int) -> None:
        before = self.engine.stats().num_made

        async def enough() -> bool:
            return self.engine.stats().num_made >= before + num_tokens

        await wait_until_async(enough, description="tokens were made")


@pytest_asyncio.fixture
async def scene(tmp_path: Path, environment: None) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    await made.engine.start()
    yield made
    await made.engine.stop()


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """What each load was given."""
    given: list[Path | None] = []
    make = InPlace.patch

    async def patch(self: InPlace, changed: Changed | None, weights: Path) -> Path | None:
        given.append(await make(self, changed, weights))
        return given[-1]

    monkeypatch.setattr(InPlace, "patch", patch)
    return given


async def test_samples_in_flight_go_on_under_each_delta(scene: Scene, patches: list[Path | None]) -> None:
    versions = [await scene.load()]
    samples = [scene.sample(number) for number in range(4)]
    for _ in range(NUM_DELTAS):
        await scene.made(40)
        versions.append(await scene.load_delta())
    for sample in await asyncio.gather(*samples):
        assert len(sample.token_ids) == NUM_TOKENS
        assert [span.version for span in sample.spans] == versions
    assert [patch is not None for patch in patches] == [False, *[True] * NUM_DELTAS]
    assert len({patch for patch in patches if patch is not None}) == 1

    in_place = await scene.engine.logprobs(IDS)
    await scene.load()
    assert np.array_equal(in_place, await scene.engine.logprobs(IDS))


async def test_an_engine_whose_delta_fails_half_way_makes_no_token_of_half_a_version(scene: Scene) -> None:
    first = await scene.load()
    sample = scene.sample(0)
    await scene.made(20)
    beyond = Elements(positions=np.array([1 << 40]), bits=np.zeros(1, dtype=np.uint16))
    embedding = scene.chain.state["model.embed_tokens.weight"]
    half = Changed(
        since=first,
        elements={
            "model.embed_tokens.weight": Elements(positions=np.arange(64), bits=embedding[64:128]),
            "model.norm.weight": beyond,
        },
        whole=(),
    )

    with pytest.raises(EngineError, match="out of bounds"):
        await scene.load_delta(half)

    num_made = scene.engine.stats().num_made
    await scene.engine.check_alive()  # a step would have come before its answer
    assert scene.engine.stats().num_made == num_made
    assert not sample.done()
    await scene.engine.stop()
    with pytest.raises(EngineError):
        await sample
