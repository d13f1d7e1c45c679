"""Rewards are tried before an evaluation loads a model: who answers, well or not, is well; who does not is named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from streamrl.errors import RewardError, RewardOutage
from streamrl.workers.evaluate import try_rewards
from streamrl.workers.rewards.base import GroupReward, Reward, RewardDouble, ScoreItem, SourceHealth
from streamrl.workers.rewards.mixing import Rewards, Weighted
from tests.http_reward_world import connect
from tests.tiny_rewards import make_item


class OfGroups:
    """Asks about pairs alone, as a judge does that compares."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def start(self) -> None: ...

    async def score_group(self, items: Sequence[ScoreItem]) -> Sequence[float]:
        self.asked.append(len(items))
        return [0.5] * len(items)

    def health(self) -> SourceHealth:
        return SourceHealth()

    async def close(self) -> None: ...


def mix(**sources: Reward | GroupReward) -> Rewards:
    return Rewards({name: Weighted(reward=reward, weight=1.0) for name, reward in sources.items()})


async def test_who_scores_or_refuses_the_first_sample_is_well_and_is_closed_again() -> None:
    def refuses(item: ScoreItem) -> float:
        raise RewardError("no such completion")

    good, strict = RewardDouble(), RewardDouble(refuses)
    await try_rewards(mix(good=good, strict=strict), make_item(), num_samples=1, patience_s=60, limit_s=60)
    assert (len(good.items), len(strict.items), good.closed, strict.closed) == (1, 1, True, True)


@pytest.mark.parametrize(("num_samples", "asked"), [(1, 1), (8, 2)])
async def test_a_source_of_groups_is_asked_about_two_samples_where_prompts_have_several(
    num_samples: int, asked: int
) -> None:
    single, of_groups = RewardDouble(), OfGroups()
    sources = mix(single=single, of_groups=of_groups)
    await try_rewards(sources, make_item(), num_samples=num_samples, patience_s=60, limit_s=60)
    assert (len(single.items), of_groups.asked) == (1, [asked])


async def test_a_source_that_says_nothing_is_named_when_its_time_is_over() -> None:
    slow, shown = RewardDouble(), list[str]()
    slow.held = asyncio.Event()
    with pytest.raises(RewardOutage, match=r"^reward 'slow' has not answered a first request within 0\.5 s$"):
        await try_rewards(
            mix(good=RewardDouble(), slow=slow),
            make_item(),
            num_samples=1,
            patience_s=0,
            limit_s=0.5,
            show=shown.append,
        )
    assert slow.closed
    assert set(shown) <= {"waiting for a first score of 'slow': 0 s"}


async def test_a_service_that_refuses_for_now_is_named_with_its_words() -> None:
    """As one whose quota is spent: it is not out, and asking it again proves nothing yet."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": "You exceeded your quota"}, headers={"retry-after": "60"})

    paid, shown = connect(answer), list[str]()
    with pytest.raises(RewardOutage, match=r"reward 'paid' \(rate-limited for \d+ s more: .*429.*exceeded your quota"):
        await try_rewards(mix(paid=paid), make_item(), num_samples=1, patience_s=60, limit_s=0.5, show=shown.append)
    assert "rate-limited" in shown[-1]


async def test_a_service_that_comes_back_within_the_patience_is_waited_for() -> None:
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 6:
            raise httpx.ConnectError("nobody is there")
        return httpx.Response(200, json={"rewards": [1.0]})

    service = connect(answer, first_pause_s=0.02)
    await try_rewards(mix(judge=service), make_item(), num_samples=1, patience_s=60, limit_s=60)
    assert num_asked == 6


async def test_a_service_that_stays_away_is_told_with_its_own_words() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody is there")

    away = mix(judge=connect(answer, first_pause_s=0.02))
    told = r"^reward 'judge': http://reward:1/score: ConnectError: nobody is there; no score for 0\.3 s"
    with pytest.raises(RewardOutage, match=told):
        await try_rewards(away, make_item(), num_samples=1, patience_s=0.3, limit_s=60)
