"""A sample that vLLM prefills under new weights carries their cache salt, whenever in a load it is requested."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import SampleError
from streamrl.workers.engines.base import EngineSettings, Load
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.engines.vllm.seats import Seats
from tests.helpers import wait_until_async
from tests.tiny_models import make_model
from tests.worker_world import a_sample_request, worker_config


class Llm:
    """What of vLLM's front end a load and a sample call, whose steps last until they may end."""

    def __init__(self) -> None:
        self.engine_core = self
        self.salts: list[str | None] = []  # of the requests, as they came
        self.step = ""
        self.may_end: dict[str, asyncio.Event] = {step: asyncio.Event() for step in ("pause", "update", "resume")}
        self.error: Exception | None = None

    async def generate(self, prompt: Mapping[str, Any], *_: object, **__: object) -> AsyncIterator[Any]:
        self.salts.append(prompt.get("cache_salt"))
        await asyncio.Event().wait()
        yield

    async def pause_scheduler_async(self, **_: object) -> None:
        await self._at("pause")

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, _: object) -> None:
        await self._at("update")

    async def finish_weight_update(self, _: str) -> None: ...

    async def resume_generation(self) -> None:
        await self._at("resume")

    async def collective_rpc(self, *_: object, **__: object) -> list[Any]:
        return [{"places": [], "reason": "a double has none"}]

    async def _at(self, step: str) -> None:
        self.step = step
        await self.may_end[step].wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def engine(tmp_path: Path) -> VllmEngine:
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)
    made = VllmEngine(EngineSettings(model=facts, config=worker_config(engine="vllm"), seed=1))
    made._seats = Seats(8)
    return made


async def is_at(llm: Llm, step: str) -> None:
    async def there() -> bool:
        return llm.step == step

    await wait_until_async(there, description=f"the load is at: {step}")


async def test_samples_requested_during_a_load_carry_the_salt_of_the_weights_that_prefill_them(
    engine: VllmEngine, tmp_path: Path
) -> None:
    llm: Any = Llm()
    engine._llm = llm
    load = Load(weights=tmp_path / "model" / "model.safetensors", version=1, step=0)
    for step in llm.may_end.values():
        step.set()
    await engine.load(load)
    tasks = [asyncio.create_task(engine.generate(a_sample_request()))]
    await asyncio.sleep(0)
    for step in llm.may_end.values():
        step.clear()
    tasks.append(loading := asyncio.create_task(engine.load(load)))
    for step in llm.may_end:
        await is_at(llm, step)
        tasks.append(asyncio.create_task(engine.generate(a_sample_request())))
        await asyncio.sleep(0)
        assert engine.stats().is_busy
        llm.may_end[step].set()
    await loading
    assert not engine.stats().is_busy
    assert engine.stats().in_flight == len(llm.salts) == 4
    assert llm.salts == ["1:1", "1:2", "1:2", "1:2"]
    await end(tasks)


async def test_samples_that_wait_for_a_pause_are_requested_though_it_fails(engine: VllmEngine, tmp_path: Path) -> None:
    """They hear of the engine's death from vLLM."""
    llm: Any = Llm()
    engine._llm, engine._version = llm, 1
    llm.error = RuntimeError("it died")
    loading = asyncio.create_task(
        engine.load(Load(weights=tmp_path / "model" / "model.safetensors", version=2, step=0))
    )
    await is_at(llm, "pause")
    sampling = asyncio.create_task(engine.generate(a_sample_request()))
    await asyncio.sleep(0)
    llm.may_end["pause"].set()
    await asyncio.wait([loading])

    async def requested() -> bool:
        return len(llm.salts) == 1

    await wait_until_async(requested, description="the sample is requested")
    await end([sampling, loading])


async def test_settings_that_vllm_refuses_fail_their_sample_and_not_the_engine(engine: VllmEngine) -> None:
    engine._llm, engine._version = Llm(), 1  # type: ignore[assignment]
    for _ in range(9):  # more than it has seats
        with pytest.raises(SampleError, match=r"temperature must be in \[0, 2\]"):
            await engine.generate(a_sample_request(temperature=2.5))
    assert engine.stats().in_flight == 0


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
