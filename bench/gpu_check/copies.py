"""Possible device-to-host paths for a version of the weights: which one reaches bus speed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.gpu_check.rows import Row, Scale
from bench.measure import seconds

_ROUNDS = 5


def check(scale: Scale) -> Iterator[Row]:
    num = 1 << (20 if scale.is_reduced else 28)  # fp32 masters, copied as bf16
    masters = torch.randn(num, device=scale.device)
    pageable = torch.empty(num, dtype=torch.bfloat16)
    yield _row(scale, "pageable, cast by the copy", pageable, lambda: pageable.copy_(masters))
    yield _row(scale, "pageable, cast on the device", pageable, lambda: pageable.copy_(masters.bfloat16()))
    if scale.is_reduced:
        return  # pinned memory needs a GPU
    pinned = torch.empty(num, dtype=torch.bfloat16, pin_memory=True)
    yield _row(scale, "pinned, cast by the copy", pinned, lambda: pinned.copy_(masters))
    yield _row(scale, "pinned, cast on the device", pinned, lambda: pinned.copy_(masters.bfloat16()))
    asynchronous = _row(
        scale, "pinned, asynchronous", pinned, lambda: pinned.copy_(masters.bfloat16(), non_blocking=True)
    )
    yield asynchronous
    yield _row(scale, "back, pinned, asynchronous", pinned, lambda: pinned.to(scale.device, non_blocking=True))


def _row(scale: Scale, what: str, arriving: torch.Tensor, copy: Callable[[], object]) -> Row:
    def timed() -> None:
        copy()
        if scale.device.type == "cuda":
            torch.cuda.synchronize(scale.device)

    timed()
    best = min(seconds(timed) for _ in range(_ROUNDS))
    return Row(
        what=what, value=arriving.nbytes / best / 1e9, unit="GB/s", note=f"of {arriving.nbytes / 1e6:.0f} MB bf16"
    )
