"""The worker's half of loading deltas in place: decides whether its vLLM engine can take a patch, and writes it.

    full load ─► ask the engine for its places, once ─► each delta: write a patch file while the engine generates

Otherwise all weights are loaded; the reason is logged once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streamrl.protocol.weights.changes import Changed
from streamrl.workers.engines.vllm.loading.patches import Place, write_patch
from streamrl.workers.engines.vllm.plugin import PLACES

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MAX_KEPT_BYTES = 256 << 20  # a patch file up to this size is kept and overwritten by the next; a larger one is deleted

log = structlog.get_logger(__name__)


class InPlace:
    """The state of one engine."""

    def __init__(self) -> None:
        self._version = 0  # the version the engine holds in full; 0: none
        self._places: list[Place] | None = None
        self._logged: set[str] = set()

    async def patch(self, changed: Changed | None, weights: Path) -> Path | None:
        """Write a patch file beside the weights and return it; None: load all weights."""
        if changed is None or self._places is None or changed.since != self._version:
            return None
        path = weights.with_name("patch")
        try:
            reason = await asyncio.to_thread(write_patch, changed, self._places, path)
        except OSError as error:  # disk full, for example
            path.unlink(missing_ok=True)
            reason = f"cannot write a patch to {path.parent}: {error.strerror}"
        if reason is None:
            return path
        self._log_once(reason)
        return None

    async def loaded(self, llm: AsyncLLM, weights: Path, version: int, patch: Path | None) -> None:
        self._version = version
        if patch is not None:
            if patch.stat().st_size > MAX_KEPT_BYTES:
                patch.unlink()
        elif self._places is not None or not self._logged:
            # Ask again even if asked before: the file may be a new one.
            [answer, *_] = await llm.collective_rpc(PLACES, args=(str(weights),))
            self._places = [Place(**place) for place in answer["places"]] or None
            if self._places is None:
                self._log_once(answer["reason"])

    def invalidate(self) -> None:
        self._version = 0

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.info("loads_all_weights", reason=reason)
