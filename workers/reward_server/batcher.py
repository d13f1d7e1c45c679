"""Dynamic batching: rows of many requests wait a moment for one another, then share forward passes.

    submit ──► pending ──► window: the oldest rows, sorted by length ──► batches of at most `max_batch_tokens`
                 │                                                            │ one thread, one forward at a time
                 └─ the oldest waits at most `max_delay_s`, or until a        ▼
                    whole batch is there; rows that arrive during a         score of each row
                    forward need not wait again after it

Owns the queue and the model's thread. Without a limit it blocks only on new rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

_WINDOW_BATCHES = 4  # sorting more rows packs better, but lets the oldest wait longer

Row = Sequence[int]  # token ids


class ScoringModel(Protocol):
    """A model to serve. Its methods may block; each is called from one thread only."""

    name: str
    vocab_size: int
    max_tokens: int | None  # per row; None: no known limit
    busy_tokens: int  # batch size that saturates the hardware; larger batches score no more tokens per second

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def score(self, rows: Sequence[Row]) -> list[float]: ...


class ScoringModelDouble:
    """One token per character, and their sum as the score; records its batches, and fails or stops on request."""

    name = "fake"
    vocab_size = 0x110000
    max_tokens = 1000
    busy_tokens = 2048

    def __init__(self) -> None:
        self.batches: list[list[Row]] = []
        self.failure: Exception | None = None
        self.may_continue = threading.Event()
        self.may_continue.set()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    def score(self, rows: Sequence[Row]) -> list[float]:
        self.batches.append(list(rows))
        assert self.may_continue.wait(10.0), "the test must let the model continue"
        if self.failure is not None:
            raise self.failure
        return [float(sum(row)) for row in rows]


class ScoringFailed(Exception):
    """The model raised, or returned something that is not a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pending:
    row: Row
    since: float
    score: asyncio.Future[float] = field(repr=False)


class Batcher:
    def __init__(self, model: ScoringModel, *, max_delay_s: float, max_batch_tokens: int) -> None:
        self._model = model
        self._max_delay_s = max_delay_s
        self._max_batch_tokens = max_batch_tokens
        self._pending: list[_Pending] = []
        self._num_pending_tokens = 0
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")
        self.last_success = -math.inf  # on the monotonic clock

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def score(self, rows: Sequence[Row]) -> list[float]:
        """Return one finite number per row, or raise ScoringFailed."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        added = [_Pending(row=row, since=now, score=loop.create_future()) for row in rows]
        self._pending += added
        self._num_pending_tokens += sum(map(len, rows))
        self._arrived.set()
        await asyncio.gather(*(entry.score for entry in added), return_exceptions=True)
        return [entry.score.result() for entry in added]

    async def run(self) -> None:
        """Score rows as they arrive, until cancelled."""
        try:
            while True:
                await self._until(lambda: self.num_pending > 0)
                left_s = self._pending[0].since + self._max_delay_s - time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, left_s)):
                        await self._until(lambda: self._num_pending_tokens >= self._max_batch_tokens)
                await self._score_window(self._take_window())
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
            for entry in self._pending:
                entry.score.cancel()

    async def _score_window(self, window: list[_Pending]) -> None:
        try:
            for batch in pack(window, self._max_batch_tokens, self._model.busy_tokens):
                await self._score_batch(batch)
        finally:
            for entry in window:
                entry.score.cancel()  # no effect on those with a score

    async def _until(self, enough: Callable[[], bool]) -> None:
        """Wait for rows until there are enough."""
        while not enough():
            self._arrived.clear()
            await self._arrived.wait()

    def _take_window(self) -> list[_Pending]:
        limit = _WINDOW_BATCHES * self._max_batch_tokens
        ends = itertools.accumulate(len(entry.row) for entry in self._pending)
        count = max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= limit, ends)))
        window, self._pending = self._pending[:count], self._pending[count:]
        self._num_pending_tokens = sum(len(entry.row) for entry in self._pending)
        return window

    async def _score_batch(self, batch: list[_Pending]) -> None:
        batch = [entry for entry in batch if not entry.score.done()]  # done: its caller has gone
        if not batch:
            return
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self._thread, self._model.score, [entry.row for entry in batch])
            if len(scores) != len(batch):
                raise ValueError(f"the model returned {len(scores)} scores for {len(batch)} rows")
        except Exception as error:  # a model may raise anything; only these rows fail, not the server
            logging.getLogger(__name__).exception("a batch of %d rows could not be scored", len(batch))
            scores, reason = [math.nan] * len(batch), f"the model raised {type(error).__name__}"
        else:
            self.last_success, reason = time.monotonic(), "the model returned no finite number"
        for entry, score in zip(batch, scores, strict=True):
            if entry.score.done():
                continue
            if math.isfinite(score):
                entry.score.set_result(score)
            else:
                entry.score.set_exception(ScoringFailed(reason))


def pack(window: list[_Pending], max_batch_tokens: int, busy_tokens: int) -> Iterator[list[_Pending]]:
    """Yield batches of similar lengths, at most `max_batch_tokens` with padding, unless a single row is longer. A batch
    that saturates the hardware takes no more rows that would need padding."""
    batch: list[_Pending] = []
    for entry in sorted(window, key=lambda entry: len(entry.row), reverse=True):
        if batch:
            # The first row is the longest: all rows of the batch are padded to it.
            width = len(batch[0].row)
            too_many = (len(batch) + 1) * width > max_batch_tokens
            too_short = len(batch) * width >= busy_tokens and len(entry.row) < width
            if too_many or too_short:
                yield batch
                batch = []
        batch.append(entry)
    if batch:
        yield batch
