"""Combines a run's reward sources: every source scores each sample, and the scores are summed by weight.

A sample to which no source applies has no reward, and fails unless an environment gives it one or, in training, a
teacher teaches it. Sources that are only logged (`config.logged`) fail no sample, and no sample waits for their
outages. Blocks only on the sources.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from streamrl.errors import RewardError, RewardOutage
from streamrl.protocol.wire.ticket import PURPOSES, Purpose
from streamrl.tasks import cancel_all
from streamrl.workers.rewards.base import GroupReward, Reward, Score, ScoreItem, SourceHealth

_TROUBLE_AFTER_S = 60.0  # a sample waiting longer than this for its score counts as trouble
_MIN_WEIGHT = 0.05  # the least weight of the newest value in the average latency
_LOOK_EVERY_S = 1.0  # whether a source that is only logged is out
T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    rewards: Mapping[str, float]  # by source that applies, unweighted
    total: float  # the weighted sum
    token_rewards: npt.NDArray[np.float64] | None = None  # [T] each token's share; None: no source scores tokens


@dataclass(slots=True, kw_only=True)
class Weighted:
    """One source in the mix, and its statistics since the worker's start."""

    reward: Reward | GroupReward
    weight: float
    max_abs: float = math.inf
    patience_s: float = 0.0  # how long a sample may wait for it, its outages included
    needed_for: Collection[Purpose] = PURPOSES  # tickets whose samples fail without its score; none: it is only logged
    scored: int = 0
    failed: int = 0
    latency_s: float = 0.0  # moving average


class Rewards:
    """All sources of a run. The sources of single samples score each item concurrently, those of groups when all items
    are there; then the scores are summed by weight."""

    def __init__(self, sources: Mapping[str, Weighted], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = dict(sources)
        self._clock = clock
        self._pending: dict[object, float] = {}  # start times of samples being scored
        self._failing = ""  # why the last score failed; empty if it did not

    async def start(self) -> None:
        """Start all sources, so that a mistake shows now and not at the first sample. On an error all are closed."""
        starting = (source.reward.start() for source in self._sources.values())
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_received(self) -> int:
        """Scores and failures received so far."""
        return sum(source.scored + source.failed for source in self._sources.values())

    @property
    def patience_s(self) -> float:
        return max((source.patience_s for source in self._sources.values()), default=0.0)

    async def score_sample(self, item: ScoreItem, purpose: Purpose = "train") -> Mapping[str, Score]:
        """Score one sample by the sources of single samples."""
        with self._tracked():
            scoring = {
                name: self._scoring(name, purpose, self._score_by(name, source.reward, item))
                for name, source in self._sources.items()
                if not isinstance(source.reward, GroupReward)
            }
            # Await all, so that after a failure no other source keeps running unobserved.
            await asyncio.gather(*scoring.values(), return_exceptions=True)
            return {name: score.result() for name, score in scoring.items()}

    async def mix(
        self,
        items: Sequence[ScoreItem],
        scored: Sequence[Mapping[str, Score]],
        *,
        must_apply: bool = True,
        purpose: Purpose = "train",
    ) -> list[Scores | RewardError]:
        """Add the group sources' scores to those of a prompt's samples, and sum them by weight. `must_apply`: a sample
        to which no source applies fails, since nothing else teaches it or gives it a reward."""
        items = [replace(item, rewards=applying(scores)) for item, scores in zip(items, scored, strict=True)]
        together = await self.score_together(items, purpose)
        scores = [{**own, **of_group} for own, of_group in zip(scored, together, strict=True)]
        mixed = [self._sum(of_sample, must_apply=must_apply, purpose=purpose) for of_sample in scores]
        self._failing = next((str(one) for one in mixed if isinstance(one, RewardError)), "")
        return mixed

    async def score_together(
        self, items: Sequence[ScoreItem], purpose: Purpose = "train"
    ) -> list[dict[str, Score | RewardError]]:
        """Score a prompt's samples, which have their rewards so far, by the sources of groups."""
        with self._tracked():
            scoring = {
                name: self._scoring(name, purpose, self._score_group_by(name, source.reward, items))
                for name, source in self._sources.items()
                if isinstance(source.reward, GroupReward) and items
            }
            await asyncio.gather(*scoring.values(), return_exceptions=True)
            by_source = {name: scores.result() or [None] * len(items) for name, scores in scoring.items()}
        for name, scores in by_source.items():
            if purpose not in self._sources[name].needed_for:
                by_source[name] = [None if isinstance(score, RewardError) else score for score in scores]
        return [{name: scores[i] for name, scores in by_source.items()} for i in range(len(items))]

    async def score(self, item: ScoreItem) -> Scores:
        """Score a sample on its own."""
        [scores] = await self.mix([item], [await self.score_sample(item)])
        if isinstance(scores, RewardError):
            raise scores
        return scores

    def trouble(self) -> str:
        """Why a sample would have to wait for its score, as far as known without asking; empty if it would not."""
        if (outage := self.outage()) is not None:
            return outage
        waited_s = self._clock() - min(self._pending.values(), default=math.inf)
        if waited_s > _TROUBLE_AFTER_S:
            return f"a sample has waited {waited_s:.0f} s for its score"
        return f"the last score failed: {self._failing}" if self._failing else ""

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        entry = object()
        self._pending[entry] = self._clock()
        try:
            yield
        except RewardError as error:
            self._failing = str(error)
            raise
        finally:
            del self._pending[entry]
        self._failing = ""

    def _sum(
        self, scores: Mapping[str, Score | RewardError], *, must_apply: bool, purpose: Purpose
    ) -> Scores | RewardError:
        failed = [score for score in scores.values() if isinstance(score, RewardError)]
        if failed:
            return failed[0]
        rewards = applying(scores)
        if must_apply and not rewards:
            all_needed = all(purpose in source.needed_for for source in self._sources.values())
            without = "returned None for it" if all_needed else "returned None for it, or failed and are only logged"
            return RewardError(f"no reward applies to this sample: {', '.join(scores)} {without}")
        total = sum((self._sources[name].weight * value for name, value in rewards.items()), 0.0)
        if not math.isfinite(total):
            return RewardError(f"the weighted sum of {rewards} is not finite")
        token_scores = [self._sources[name].weight * s for name, s in scores.items() if isinstance(s, np.ndarray)]
        return Scores(
            rewards=rewards, total=total, token_rewards=np.sum(token_scores, axis=0) if token_scores else None
        )

    def outage(self) -> str | None:
        """Which source cannot score at all now, and why, so that sampling for it is pointless; None if all that samples
        need can."""
        for name, source in self._sources.items():
            if source.needed_for and (outage := source.reward.health().outage) is not None:
                return f"reward {name!r}: {outage}"
        return None

    def silent(self) -> dict[str, str]:
        """Return the sources without any answer or failure yet, and their states."""
        silent = {name: source for name, source in self._sources.items() if source.scored + source.failed == 0}
        return {name: source.reward.health().state for name, source in silent.items()}

    def unwell(self) -> dict[str, str]:
        """Return the states of sources that do not score as usual, even if they score again by themselves."""
        states = {name: source.reward.health().state for name, source in self._sources.items()}
        return {name: state for name, state in states.items() if state != "well"}

    def facts(self) -> dict[str, int | float | str]:
        """What the monitor shows for each source."""
        facts: dict[str, int | float | str] = {}
        for name, source in self._sources.items():
            health = source.reward.health()
            facts[f"rewards/{name}/state"] = health.state
            if health.num_tokens is not None:
                facts[f"rewards/{name}/tokens"] = health.num_tokens
            facts[f"rewards/{name}/latency_s"] = round(source.latency_s, 4)
            facts[f"rewards/{name}/scored"] = source.scored
            facts[f"rewards/{name}/failed"] = source.failed
        return facts

    async def close(self) -> None:
        await asyncio.gather(*(source.reward.close() for source in self._sources.values()))

    def _scoring(self, name: str, purpose: Purpose, scoring: Coroutine[Any, Any, T]) -> asyncio.Future[T | None]:
        source = self._sources[name]
        if purpose not in source.needed_for:
            return asyncio.ensure_future(_scores_or_none(scoring, source.reward.health, partial(self._failed, name)))
        return asyncio.ensure_future(scoring)

    async def _score_by(self, name: str, reward: Reward, item: ScoreItem) -> Score:
        began = self._clock()
        try:
            value = await reward.score(item)
        except RewardError as error:
            raise self._failed(name, error) from error
        checked = self._checked(name, value, began)
        if isinstance(checked, RewardError):
            raise checked
        return checked

    async def _score_group_by(
        self, name: str, reward: GroupReward, items: Sequence[ScoreItem]
    ) -> list[Score | RewardError]:
        began = self._clock()
        values: Sequence[float | RewardError | None]
        try:
            values = await reward.score_group(items)
        except RewardOutage as error:
            raise self._failed(name, error) from error
        except RewardError as error:
            values = [error] * len(items)
        return [self._checked(name, value, began) for value in values]

    def _checked(self, name: str, value: Score | RewardError, began: float) -> Score | RewardError:
        source = self._sources[name]
        if isinstance(value, RewardError):
            return self._failed(name, value)
        worth = 0.0 if value is None else worth_of(value)
        if not math.isfinite(worth):
            return self._failed(name, RewardError(f"gave {worth}, not a finite number"))
        for label, number in (("", worth), ("a token ", _largest(value))):
            if abs(number) > source.max_abs:
                reason = f"gave {label}{number:g}, beyond its max_abs of {source.max_abs:g}"
                return self._failed(name, RewardError(reason))
        source.scored += 1
        share = max(_MIN_WEIGHT, 1 / source.scored)
        source.latency_s += share * (self._clock() - began - source.latency_s)
        return float(value) if isinstance(value, int | float) else value

    def _failed(self, name: str, error: RewardError) -> RewardError:
        self._sources[name].failed += 1
        return type(error)(f"reward {name!r}: {error}")


def applying(scores: Mapping[str, Score | RewardError]) -> dict[str, float]:
    """Return the rewards of the sources that apply."""
    return {
        name: worth_of(score)
        for name, score in scores.items()
        if score is not None and not isinstance(score, RewardError)
    }


def worth_of(score: float | npt.NDArray[np.float64]) -> float:
    """Return a sample's reward: the score, or the sum over its tokens."""
    return float(score) if not isinstance(score, np.ndarray) else float(sum(score.tolist()))  # no warning at inf - inf


def _largest(score: Score) -> float:
    """Return the token score of largest magnitude, since they may cancel in the sum; 0 if there are none."""
    if not isinstance(score, np.ndarray) or not len(score):
        return 0.0
    return float(score[np.abs(score).argmax()])


async def _scores_or_none(
    scoring: Coroutine[Any, Any, T], health: Callable[[], SourceHealth], gave_up: Callable[[RewardError], object]
) -> T | None:
    """Return the scores of a source that is only logged; None if it fails, or as soon as it is out, of which `gave_up`
    is told."""
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
