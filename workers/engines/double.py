"""The engine test double: no model, tokens derived from the request, and failures on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streamrl.errors import EngineError, StreamrlError
from streamrl.protocol.weights.changes import Changed
from streamrl.protocol.wire.sample import Span
from streamrl.workers.engines.base import EngineStats, Generated, Load, ReadBack, SampleRequest


class EngineDouble:
    """Answer at once, or on command.

    At most `capacity` samples run at a time, each for `sample_s`. With `hold=True`, all samples, or those that `holds`
    selects, wait for `release`; a load in between shows in their spans, as in a real engine. `trouble` may return an
    error for a request to raise.
    """

    def __init__(
        self,
        *,
        num_tokens: int = 4,
        hold: bool = False,
        holds: Callable[[SampleRequest], bool] = lambda request: True,
        capacity: int = 1 << 30,
        sample_s: float = 0.0,
        trouble: Callable[[SampleRequest], StreamrlError | None] = lambda request: None,
    ) -> None:
        self.requests: list[SampleRequest] = []
        self.loads: list[tuple[Path, int, int]] = []  # (weights, version, step)
        self.changes: list[Changed | None] = []  # the `changed` of each load
        self.num_decoys = 0
        self.read_parts: list[int] = []  # `num_parts` of each `read_back`
        self.wrong: tuple[str, ...] = ()  # what `read_back` reports
        self.may_be_read = asyncio.Event()  # `read_back` waits for it
        self.may_be_read.set()
        self.started = self.stopped = False
        self.kv_used = 0.0  # as `stats` reports it
        self._num_tokens = num_tokens
        self._trouble = trouble
        self._holds = holds
        self._dead: EngineError | None = None
        self._free = asyncio.Event()
        self._slots = asyncio.Semaphore(capacity)
        self._capacity = capacity
        self._sample_s = sample_s
        self._in_flight = 0
        self._finished_tokens = 0
        if not hold:
            self._free.set()

    async def start(self) -> None:
        self.started = True

    async def load(self, load: Load) -> None:
        self._check()
        self.loads.append((load.weights, load.version, load.step))
        self.changes.append(load.changed)

    async def load_decoy(self, weights: Path) -> None:
        self._check()
        self.num_decoys += 1

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        self._check()
        await self.may_be_read.wait()
        self.read_parts.append(num_parts)
        return ReadBack(num_read=1, wrong=self.wrong)

    async def generate(self, request: SampleRequest) -> Generated:
        self._check()
        assert self.loads, "a sample was requested before any version was loaded"
        self.requests.append(request)
        first_load = self.loads[-1]
        self._in_flight += 1
        try:
            if self._holds(request):
                await self._free.wait()
            async with self._slots:
                await asyncio.sleep(self._sample_s)
        finally:
            self._in_flight -= 1
        self._check()
        if (error := self._trouble(request)) is not None:
            raise error
        self._finished_tokens += self._num_tokens
        return self._sample(request, first_load)

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._check()
        return np.full(len(token_ids) - 1, -0.5, dtype=np.float32)

    async def check_alive(self) -> None:
        self._check()

    async def stop(self) -> None:
        self.stopped = True

    def stats(self) -> EngineStats:
        return EngineStats(
            in_flight=self._in_flight,
            num_made=self._finished_tokens,
            num_waiting=max(0, self._in_flight - self._capacity),
            kv_used=self.kv_used,
        )

    def release(self) -> None:
        """Let all waiting samples finish, and all later ones."""
        self._free.set()

    def die(self, reason: str = "the test ended this engine") -> None:
        """Make every call fail from now on, pending ones included."""
        self._dead = EngineError(reason)
        self._free.set()

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _sample(self, request: SampleRequest, first_load: tuple[Path, int, int]) -> Generated:
        length, first = self._num_tokens, int(request.prompt_ids[0])
        parts = [(first_load, 0, length)]
        if self.loads[-1][1] != first_load[1]:
            parts = [(first_load, 0, length // 2), (self.loads[-1], length // 2, length)]
        return Generated(
            token_ids=np.arange(first, first + length, dtype=np.int32),
            logprobs=np.full(length, -0.25, dtype=np.float32),
            text=" ".join(str(first + i) for i in range(length)),
            finish_reason="stop",
            spans=tuple(Span(version=load[1], step=load[2], start=start, end=end) for load, start, end in parts),
        )
