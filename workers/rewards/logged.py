"""Awaits the scores of a source that is only logged (`config.logged`): its failures fail no sample, and no sample waits
for its outages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from streamrl.errors import RewardError
from streamrl.tasks import cancel_all
from streamrl.workers.rewards.base import SourceHealth

_LOOK_EVERY_S = 1.0  # whether the source is out
T = TypeVar("T")

log = structlog.get_logger(__name__)


async def if_it_can(
    scoring: Coroutine[Any, Any, T], health: Callable[[], SourceHealth], gave_up: Callable[[RewardError], object]
) -> T | None:
    """Return the scores; None if the source fails, or as soon as it is out, of which `gave_up` is told."""
    task = asyncio.ensure_future(scoring)
    try:
        while not task.done() and (outage := health().outage) is None:
            await asyncio.wait([task], timeout=_LOOK_EVERY_S)
        if task.done():
            return task.result()
        gave_up(RewardError(str(outage)))
    except RewardError as error:
        log.warning("logged_reward_failed", error=str(error))
    finally:
        await cancel_all([task])
    return None
