"""Metrics of a rank's GPU at each step: memory and utilisation; empty without a GPU. The peaks of GPUs, for MFU.

torch reports utilisation only if nvidia-ml-py is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import structlog
import torch

# Dense bf16 per card, as the makers state it. The first name whose words the card's name has counts.
_PEAK_TFLOPS: Mapping[str, float] = {
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A100X": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10": 125,
    "A10G": 70,
    "RTX 4090": 165,
}

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


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of one device; None when it is not known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Peak FLOP/s of a device with this name."""
    peaks = (1e12 * peak for card, peak in _PEAK_TFLOPS.items() if re.search(rf"\b{card}\b", name))
    return next(peaks, None)
