"""Dynamic batching: who shares a batch, who waits how long, and who is hurt by a failure."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from streamrl.workers.reward_server.batcher import Batcher, ScoringFailed, ScoringModelDouble
from tests.helpers import wait_until


@asynccontextmanager
async def running(
    model: ScoringModelDouble, *, max_delay_s: float = 0.0, max_batch_tokens: int = 100
) -> AsyncIterator[Batcher]:
    batcher = Batcher(model, max_delay_s=max_delay_s, max_batch_tokens=max_batch_tokens)
    task = asyncio.create_task(batcher.run(), name="batcher")
    try:
        yield batcher
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_requests_of_the_same_moment_share_a_batch_and_get_their_own_scores() -> None:
    model = ScoringModelDouble()
    async with running(model, max_delay_s=0.05) as batcher:
        scores = await asyncio.gather(*(batcher.score([[i], [i, i]]) for i in range(10)))
    assert scores == [[float(i), float(2 * i)] for i in range(10)]
    assert len(model.batches) == 1


async def test_batches_are_of_similar_lengths_and_within_the_limit_with_padding_counted() -> None:
    model = ScoringModelDouble()
    rows = [[1] * (1 + i % 40) for i in range(200)]
    async with running(model, max_delay_s=0.05) as batcher:
        scores = await batcher.score(rows)
    assert scores == [float(len(row)) for row in rows]
    padded = [len(batch) * max(map(len, batch)) for batch in model.batches]
    assert max(padded) <= 100
    assert sum(padded) < 1.5 * sum(map(len, rows))


async def test_a_batch_that_keeps_the_hardware_busy_takes_no_rows_that_need_padding() -> None:
    model = ScoringModelDouble()
    model.busy_tokens = 20
    async with running(model, max_delay_s=0.05, max_batch_tokens=1000) as batcher:
        await batcher.score([[1] * 10, [1] * 10, [1] * 10, [1] * 9, [1] * 2])
    assert [sorted(map(len, batch)) for batch in model.batches] == [[10, 10, 10], [2, 9]]


async def test_a_row_above_the_limit_gets_a_batch_of_its_own() -> None:
    model = ScoringModelDouble()
    async with running(model) as batcher:
        assert await batcher.score([[1] * 500, [1]]) == [500.0, 1.0]
    assert sorted(map(len, model.batches)) == [1, 1]


async def test_a_full_batch_does_not_wait_for_the_delay() -> None:
    async with running(ScoringModelDouble(), max_delay_s=3600, max_batch_tokens=10) as batcher:
        assert await asyncio.wait_for(batcher.score([[1] * 10]), 5) == [10.0]


async def test_a_lone_request_waits_for_the_delay_and_not_longer() -> None:
    async with running(ScoringModelDouble(), max_delay_s=0.05) as batcher:
        begin = time.monotonic()
        await batcher.score([[1]])
        assert 0.05 <= time.monotonic() - begin < 1.0


async def test_a_model_that_raises_costs_the_batch_and_not_the_server() -> None:
    model = ScoringModelDouble()
    async with running(model) as batcher:
        model.failure = RuntimeError("no memory")
        with pytest.raises(ScoringFailed, match="the model raised RuntimeError"):
            await batcher.score([[1], [2]])
        assert batcher.last_success == -math.inf
        model.failure = None
        assert await batcher.score([[1]]) == [1.0]
        assert batcher.last_success > 0


async def test_a_score_that_is_not_finite_is_an_error_and_its_neighbours_keep_theirs() -> None:
    model = ScoringModelDouble()
    model.score = lambda rows: [math.nan if len(row) == 2 else 1.0 for row in rows]  # type: ignore[method-assign]
    async with running(model, max_delay_s=0.05) as batcher:
        good, bad = await asyncio.gather(batcher.score([[1]]), batcher.score([[1, 2]]), return_exceptions=True)
    assert good == [1.0]
    assert isinstance(bad, ScoringFailed)


async def test_a_model_that_answers_too_few_scores_costs_the_batch_and_not_the_server() -> None:
    model = ScoringModelDouble()
    answers = iter([[1.0], [3.0]])
    model.score = lambda rows: next(answers)  # type: ignore[method-assign]
    async with running(model) as batcher:
        with pytest.raises(ScoringFailed):
            await batcher.score([[1], [2]])
        assert await batcher.score([[3]]) == [3.0]


async def test_what_nobody_waits_for_any_more_is_not_scored() -> None:
    model = ScoringModelDouble()
    model.may_continue.clear()
    async with running(model, max_batch_tokens=10) as batcher:
        first, *others = (asyncio.create_task(batcher.score([[number] * 10])) for number in range(4))
        await asyncio.to_thread(wait_until, lambda: model.batches, description="the first one is being scored")
        others.pop(0).cancel()
        model.may_continue.set()
        assert await asyncio.gather(first, *others) == [[0.0], [20.0], [30.0]]
    assert [batch[0][0] for batch in model.batches] == [0, 2, 3]


async def test_stopping_leaves_nobody_waiting() -> None:
    async with running(ScoringModelDouble(), max_delay_s=3600) as batcher:
        waiting = asyncio.create_task(batcher.score([[1]]))
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5)
