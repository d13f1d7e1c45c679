"""Metrics of a rank's GPU at each step: memory and utilisation. Empty without a GPU.

torch reports utilisation only if nvidia-ml-py is installed.
"""

from __future__ import annotations

from typing import Any

import structlog
import torch

log = structlog.get_logger(__name__)


class Gpu:
    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._is_there = self._tells_use = device.type == "cuda"

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        return {**self._memory(), **self._use()} if self._is_there else {}

    def _memory(self) -> dict[str, float]:
        free, total = self._cuda.mem_get_info(self._device)
        peak = self._cuda.max_memory_allocated(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        return {"gpu/memory": 1 - free / total, "gpu/peak_memory": peak / total}

    def _use(self) -> dict[str, float]:
        if not self._tells_use:
            return {}
        try:
            return {"gpu/use": self._cuda.utilization(self._device) / 100}
        except Exception:  # nvidia-ml-py is not installed, or fails
            log.info("GPU utilisation is unknown", exc_info=True)
            self._tells_use = False
            return {}
