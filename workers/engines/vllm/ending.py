"""How vLLM is ended: EngineCore is killed if it starts too slowly or a host is lost; else vLLM shuts down unread."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

from streamrl.errors import EngineError
from streamrl.tasks import cancel_all

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def kill_engine_core() -> None:
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()


async def stop_reading(llm: AsyncLLM) -> None:
    """Stop reading outputs before shutdown; else vLLM may report it as an engine death, with a traceback."""
    if llm.output_handler is not None:
        await cancel_all([llm.output_handler])
        llm.output_processor.propagate_error(EngineError("the engine was stopped"))
