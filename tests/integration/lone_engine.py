"""A vLLM engine in a process of its own, to be killed: `python -m tests.integration.lone_engine MODEL ENGINE_ARGS`.

vLLM chooses by itself how its processes start: on CPUs they are spawned whatever anybody says, on GPUs they are forked
unless somebody says otherwise. Here, on CPUs, its choice is as on GPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.engine import VllmEngine
from tests.worker_world import worker_config

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def choose_as_on_gpus() -> None:
    from vllm.platforms.cpu import CpuPlatform

    update: Any = CpuPlatform.check_and_update_config

    def update_but_for_the_start_method(_cls: type, config: Any) -> None:
        before = os.environ.pop(START_METHOD, None)
        update(config)
        del os.environ[START_METHOD]
        os.environ.update({} if before is None else {START_METHOD: before})

    CpuPlatform.check_and_update_config = classmethod(update_but_for_the_start_method)  # type: ignore[assignment]


async def main(model: str, engine_args: str) -> None:
    facts = read_model(model, trust_remote_code=False)
    config = worker_config(engine="vllm", threads=1, engine_args=json.loads(engine_args))
    engine = VllmEngine(EngineSettings(model=facts, config=config, seed=1))
    choose_as_on_gpus()
    await engine.start()
    print("ready", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
