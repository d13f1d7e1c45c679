"""What a worker makes of an engine that is told to end, or that does not start in time."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamrl.errors import EngineError
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import Engine, EngineSettings, Meeting
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.transformers_engine import TransformersEngine
from streamrl.workers.engines.vllm.engine import VllmEngine
from streamrl.workers.engines.vllm.seats import Seats
from streamrl.workers.rollout.roles import WorkDouble
from streamrl.workers.supervise import RestartPatience, Supervisor
from streamrl.workers.weights.roles import WeightsDouble
from tests.tiny_models import make_model
from tests.worker_world import a_sample_request, worker_config


class Ending:
    """A front end of vLLM whose engine has been told to end."""

    async def generate(self, *_: object, **__: object) -> AsyncIterator[Any]:
        output = SimpleNamespace(finish_reason="abort", token_ids=[5], logprobs=None)
        yield SimpleNamespace(finished=True, outputs=[output], prompt_logprobs=None)


class SlowVllm(VllmEngine):
    """Its EngineCore is still loading when its time is up."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.core: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=time.sleep, args=(3600.0,), name="EngineCore_DP0"
        )
        self.core.start()

    def _build(self, meeting: Meeting | None) -> None:
        self.core.join()
        raise RuntimeError("Engine core initialization failed")


def settings_of(folder: Path, engine: str, **worker: Any) -> EngineSettings:
    facts = read_model(str(make_model(folder / "model")), trust_remote_code=False)
    return EngineSettings(model=facts, config=worker_config(engine=engine, **worker), seed=1)


async def test_samples_and_canaries_that_vllm_aborts_say_that_it_ends(tmp_path: Path) -> None:
    """A failed sample would count against its ticket."""
    engine = VllmEngine(settings_of(tmp_path, "vllm"))
    engine._llm, engine._version, engine._seats = Ending(), 1, Seats(8)  # type: ignore[assignment]
    with pytest.raises(EngineError, match="vLLM is ending"):
        await engine.generate(a_sample_request())
    with pytest.raises(EngineError, match="vLLM is ending"):
        await engine.logprobs(np.arange(3, dtype=np.int32))


async def test_an_engine_that_is_slow_to_start_is_killed_and_followed_by_another(tmp_path: Path) -> None:
    """It may have started well before, from a disk that was faster."""
    slow, second = SlowVllm(settings_of(tmp_path, "vllm", start_timeout_s=0.05)), EngineDouble()
    engines: list[Engine] = [second, slow]
    work = WorkDouble()
    supervisor = Supervisor(
        rollout=work,
        weights=WeightsDouble(),
        make_engine=engines.pop,
        progress=Progress(part="worker/0", role="worker"),
        patience=RestartPatience(first_pause_s=0.001, spread_s=0.01, rejected_s=10.0),
    )
    await asyncio.wait_for(supervisor.run(asyncio.Event()), 10)
    assert work.engines == [second]
    slow.core.join(10)
    assert slow.core.exitcode == -signal.SIGKILL


async def test_a_start_that_takes_too_long_is_not_the_users_mistake(tmp_path: Path) -> None:
    engine = TransformersEngine(settings_of(tmp_path, "transformers", start_timeout_s=1e-6))
    with pytest.raises(EngineError, match=r"worker\.start_timeout_s=1e-06"):
        await engine.start()
    await engine.stop()
