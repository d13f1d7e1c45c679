"""A vLLM that we end ends in silence: it is not left to find its engine gone, which it prints with a traceback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import EngineError
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from tests.tiny_models import make_model
from tests.worker_world import worker_config


class Llm:
    """What of vLLM's front end is there at the end."""

    def __init__(self) -> None:
        self.output_handler: asyncio.Task[Any] | None = asyncio.create_task(asyncio.sleep(3600))
        self.output_processor = self
        self.told: list[Exception] = []
        self.was_quiet = False

    def propagate_error(self, error: Exception) -> None:
        self.told.append(error)

    def shutdown(self, timeout: float) -> None:
        self.was_quiet = self.output_handler is None or self.output_handler.done()


@pytest.mark.asyncio
async def test_nobody_reads_the_engine_any_more_when_it_is_shut_down(tmp_path: Path) -> None:
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)
    engine = VllmEngine(EngineSettings(model=facts, config=worker_config(engine="vllm"), seed=1))
    llm: Any = Llm()
    engine._llm = llm

    await engine.stop()

    assert llm.was_quiet
    assert isinstance(llm.told[0], EngineError)  # whoever still waits for a sample hears of it
