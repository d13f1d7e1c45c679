"""An engine that cannot start: vLLM's front end learns that its processes failed, and its user learns why."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import EngineError
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm_engine import VllmEngine
from tests.tiny_models import make_model
from tests.worker_world import worker_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


async def test_the_reason_is_that_of_the_process_that_failed(tmp_path: Path) -> None:
    """As on a GPU with too little memory left."""
    facts = read_model(str(make_model(tmp_path / "model")), trust_remote_code=False)
    config = worker_config(engine="vllm", threads=1, engine_args={"kv_cache_memory_bytes": 1})
    engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))
    with pytest.raises(EngineError, match=r"^vLLM did not start: ValueError: .*cache blocks") as caught:
        await engine.start()
    await engine.stop()
    assert "root cause above" not in str(caught.value)
    assert "\n" not in str(caught.value)
