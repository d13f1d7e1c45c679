"""Copies tensors to the host with a cast: synchronously on a CPU, or in a stream of a GPU.

    GPU   masters ─► cast on the GPU ─► pinned memory ─► event ─► returned ─► encoded
                 └─► cast once more ─► a sum of its words ──────────────────┴─ equal?

All copies of a version are queued before the first is awaited, so that the bus does not idle; the loop waits for the
last one's event. On a GPU the second cast, which proves that the published bytes are this step's, is not copied to the
host: it is summed on the GPU, and the copy is summed beside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.pinning import CudaRuntime, CudaRuntimeDouble, Pinned

_PIECE_ELEMENTS = 1 << 24  # cast by a GPU at a time
_WORD_BYTES = 8
_MODULUS = 1 << 64
_BLOCK_WORDS = 1 << 16  # summed on the host at a time, from its cache

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source): flat, of equal length
Ready = Callable[[], None]  # blocks until the copies are on the host
Check = Callable[[], None]  # WeightsError unless the host's bytes are the cast of their source


class Copier(Protocol):
    checks: bool  # whether it verifies itself that copies are casts

    def begin(self, host: torch.Tensor) -> None:
        """Prepare to copy what the model has computed by now into this memory, which is 8-byte aligned."""

    def copy(self, copies: Copies) -> tuple[Ready, Check]:
        """Queue copies: read them after `Ready` returns; `Check` may be called later, in another thread."""
        ...


class AtOnce:
    """Copies on the host, when the copy is awaited."""

    checks = False

    def begin(self, host: torch.Tensor) -> None:
        del host

    def copy(self, copies: Copies) -> tuple[Ready, Check]:
        def ready() -> None:
            for target, source in copies:
                target.copy_(source)

        return ready, lambda: None


class Stream(Protocol):
    """A GPU stream, separate from the model's."""

    def follow_model(self) -> None:
        """Make later work wait for the model's work queued so far."""

    def __call__(self) -> AbstractContextManager[object]:
        """Return a context whose work goes into this stream."""
        ...

    def mark(self) -> Ready:
        """Return a function that blocks until all work queued so far is done."""
        ...

    def runtime(self) -> CudaRuntime: ...

    def launch(self) -> None:
        """Launch any kernel."""
        ...


class OnStream:
    checks = True

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pinned = Pinned(stream.runtime(), stream.launch)
        self._host_at = 0

    def begin(self, host: torch.Tensor) -> None:
        if host.data_ptr() != self._host_at:
            self._pinned.hold(host)
            self._host_at = host.data_ptr()
        self._stream.follow_model()

    def copy(self, copies: Copies) -> tuple[Ready, Check]:
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []  # (copy on the host, sum of its words)
        with self._stream():
            for target, source in copies:
                for to, values in zip(target.split(_PIECE_ELEMENTS), source.split(_PIECE_ELEMENTS), strict=True):
                    to.copy_(values.to(to.dtype), non_blocking=True)
                    sums.append((to, sum_of_words(values.to(to.dtype)).to("cpu", non_blocking=True)))
            ready = self._stream.mark()

        def check() -> None:
            for copied, expected in sums:
                if sum_on_host(copied) != int(expected) % _MODULUS:
                    raise WeightsError("the bytes copied from the GPU are not the cast of this step's weights")

        return ready, check


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def follow_model(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def __call__(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Ready:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def runtime(self) -> CudaRuntime:
        runtime: CudaRuntime = torch.cuda.cudart()
        return runtime

    def launch(self) -> None:
        torch.ones(1, device=self._device)


class StreamDouble:
    """A stream that only records its calls; `mark` works when it is awaited."""

    def __init__(self, runtime: CudaRuntimeDouble) -> None:
        self.calls: list[str] = []
        self._runtime = runtime

    def follow_model(self) -> None:
        self.calls.append("follow")

    def __call__(self) -> AbstractContextManager[object]:
        self.calls.append("copy")
        return nullcontext()

    def mark(self) -> Ready:
        return lambda: self.calls.append("wait")

    def runtime(self) -> CudaRuntime:
        return self._runtime

    def launch(self) -> None:
        self._runtime.launch()


def copier_for(device: torch.device) -> Copier:
    return OnStream(CudaStream(device)) if device.type == "cuda" else AtOnce()


def sum_of_words(values: torch.Tensor) -> torch.Tensor:
    """Sum the bytes as 64-bit integers, each times its own odd factor, mod 2^64: any single differing bit changes the
    sum.
    """
    num_left = -values.nbytes % _WORD_BYTES // values.element_size()
    words = torch.nn.functional.pad(values, (0, num_left)).view(torch.int64)
    odd = torch.arange(1, 2 * len(words), 2, device=words.device)
    return (words * odd).sum()


def sum_on_host(values: torch.Tensor) -> int:
    """The same sum, mod 2^64, in one pass over the memory: numpy multiplies and sums integers without the temporaries
    that torch needs.
    """
    flat = values.view(torch.uint8).numpy()
    if num_left := -len(flat) % _WORD_BYTES:
        flat = np.pad(flat, (0, num_left))
    words, odd = flat.view(np.uint64), np.arange(1, 2 * _BLOCK_WORDS, 2, dtype=np.uint64)
    total = 0
    for begin in range(0, len(words), _BLOCK_WORDS):
        block = words[begin : begin + _BLOCK_WORDS]
        total += int(np.dot(block, odd[: len(block)])) + 2 * begin * int(block.sum())
    return total % _MODULUS
