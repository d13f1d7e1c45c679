"""A vLLM engine with timings: tokens per step, the start of each load, and vLLM's own reloads."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.config import schema
from streamrl.workers.engines.base import KvCache, Load, SampleRequest
from streamrl.workers.engines.vllm.engine import VllmEngine

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs

PROMPT_TOKENS, MAX_TOKENS = 128, 256
_MIN_TOKENS = 32
GROUP_SIZE = 8  # samples per prompt


class WatchedEngine(VllmEngine):
    """Its loads use its own `kv_cache` mode, whatever they request."""

    kv_cache: KvCache = "salt"
    load_began = 0.0
    paused_s = 0.0  # engine's pause for the last load, from the end of its last step

    def watch(self) -> None:
        """Start recording; call before the first request."""
        self._made: list[tuple[float, int]] = []  # (time, tokens) of each step
        core = self.bare().engine_core
        pass_on, pause, resume = core.get_output_async, core.pause_scheduler_async, core.resume_scheduler_async
        paused_at = 0.0

        async def get_output_async() -> EngineCoreOutputs:
            outputs = await pass_on()
            num_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
            if num_tokens:
                self._made.append((time.perf_counter(), num_tokens))
            return outputs

        async def pause_scheduler_async(**how: Any) -> None:
            nonlocal paused_at
            await pause(**how)  # returns between two steps
            paused_at = time.perf_counter()

        async def resume_scheduler_async() -> None:
            await resume()
            self.paused_s = time.perf_counter() - paused_at

        core.get_output_async = get_output_async
        core.pause_scheduler_async = pause_scheduler_async
        core.resume_scheduler_async = resume_scheduler_async

    async def load(self, load: Load) -> None:
        self.load_began = time.perf_counter()
        await super().load(replace(load, kv_cache=self.kv_cache))

    async def reload_file(self, path: Path) -> None:
        """Reload from a checkpoint, as without versions. Call `restore` before the next version is loaded."""
        self.load_began = time.perf_counter()
        core = self.bare().engine_core
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._own("reload_file", str(path))
        await self.bare().resume_generation()

    async def measure_own_reload(self, path: Path) -> float:
        """Time vLLM's own reload of this file's tensors from memory; they are already being served."""
        await self._own("hold_tensors", str(path))
        [elapsed] = await self._own("reload_held")
        await self.restore()
        return elapsed

    async def restore(self) -> None:
        """Load the held tensors in our layout."""
        await self._own("restore_held")

    def num_made(self, begin: float, end: float) -> int:
        """Count the tokens of steps that ended in this interval."""
        return sum(tokens for at, tokens in self._made if begin <= at < end)

    async def _own(self, method: str, *args: str) -> list[float]:
        outcome: list[float] = await self.bare().collective_rpc(method, args=args)
        return outcome


async def keep_busy(engine: WatchedEngine, *, num_in_flight: int, vocabulary: int) -> None:
    """Keep this many samples in flight, with shared prompts and mixed lengths, until cancelled."""
    numbers = iter(range(1 << 30))

    async def one_after_another() -> None:
        for number in numbers:
            group, rng = np.random.default_rng(number // GROUP_SIZE), np.random.default_rng(number)
            request = SampleRequest(
                request_id=f"sample-{number}",
                prompt_ids=group.integers(2, vocabulary, size=PROMPT_TOKENS, dtype=np.int32),
                sampling=schema.Sampling(max_tokens=int(rng.integers(_MIN_TOKENS, MAX_TOKENS + 1))),
            )
            await engine.generate(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_in_flight):
            group.create_task(one_after_another())
