"""Rewards of tokens: from a function through worker and wire to an advantage of each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError, WireError
from streamrl.permissions import Permissions
from streamrl.protocol.wire.group import Group, decode_body, decode_header, encode_group
from streamrl.protocol.wire.ticket import MAX_TOKENS
from streamrl.recipe.advantages import ScoredGroup, tokens, turns
from streamrl.recipe.algorithms import make_algorithm
from streamrl.workers.rewards.base import RewardDouble, ScoreItem
from streamrl.workers.rewards.build import build_reward
from streamrl.workers.rewards.mixing import Rewards, Weighted
from tests.learner_cases import group_of
from tests.tiny_rewards import make_item
from tests.unit.test_turn_advantages import estimates, exact_gradient
from tests.worker_world import WorkerWorld

CODE = """
def each(prompt, completion, token_ids, fields):
    return [float(one) for one in token_ids]

def short(prompt, completion, token_ids, fields):
    return [1.0]

def whole(prompt, completion, token_ids, fields):
    return 1.0

def long(prompt, completion, token_ids, fields):
    return [1 / (3 + one) for one in token_ids]

def of_trl(completions, **kwargs):
    return [1.0 for one in completions]

def broken(prompt, completion, token_ids, fields):
    return [float("nan")] * len(token_ids)
"""


async def scored(folder: Path, function: str, item: ScoreItem) -> Any:
    (folder / "mine.py").write_text(CODE)
    target = f"{folder}/mine.py:{function}"
    source = schema.FunctionReward(type="function", target=target, per_token=True)
    reward: Any = build_reward("mine", source, Permissions(reward_code=(target,)), None)
    try:
        await reward.start()
        return await reward.score(item)
    finally:
        await reward.close()


async def test_a_function_gives_a_number_for_each_token(tmp_path: Path) -> None:
    assert (await scored(tmp_path, "each", make_item("abc"))).tolist() == [0.0, 1.0, 2.0]
    assert (await scored(tmp_path, "each", make_item(""))).tolist() == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("short", r"returned \[1.0\], not a number for each of 3 tokens"),
        ("whole", r"returned 1.0, not a number for each of 3 tokens"),
        ("broken", "not a finite number"),
    ],
)
async def test_anything_else_fails_the_sample(function: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=words):
        await scored(tmp_path, function, make_item("abc"))


async def test_a_response_as_long_as_they_come_has_a_number_for_each_token_too(tmp_path: Path) -> None:
    item = replace(make_item("a"), token_ids=np.arange(MAX_TOKENS, dtype=np.int32))
    assert (await scored(tmp_path, "long", item)).sum() == pytest.approx(sum(1 / (3 + i) for i in range(MAX_TOKENS)))


async def test_a_function_of_trls_form_that_is_to_give_them_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="per_token needs a function of streamrl's form"):
        await scored(tmp_path, "of_trl", make_item("abc"))


async def test_they_are_added_by_weight_beside_rewards_of_the_whole() -> None:
    of_tokens = RewardDouble(lambda item: np.array([1.0, -2.0, 4.0]))
    rewards = Rewards(
        {
            "tokens": Weighted(reward=of_tokens, weight=0.5),
            "more": Weighted(reward=of_tokens, weight=1.0),
            "whole": Weighted(reward=RewardDouble(lambda item: 10.0), weight=2.0),
        }
    )
    scores = await rewards.score(make_item("abc"))
    assert scores.rewards == {"tokens": 3.0, "more": 3.0, "whole": 10.0}
    assert scores.total == 24.5
    assert scores.token_rewards is not None
    assert scores.token_rewards.tolist() == [1.5, -3.0, 6.0]


async def test_a_sum_beyond_the_limit_or_not_finite_is_nonsense() -> None:
    for values in ([1e9, 0.0], [np.inf, 0.0], [np.inf, -np.inf], [1e39, -1e39]):
        double = RewardDouble(lambda item, values=values: np.array(values))
        with pytest.raises(RewardError, match="reward 'mine': gave"):
            await Rewards({"mine": Weighted(reward=double, weight=1.0, max_abs=1e6)}).score(make_item("ab"))


async def test_a_worker_delivers_them_and_who_has_none_delivers_none() -> None:
    for judge in (lambda item: np.arange(len(item.token_ids), dtype=np.float64), lambda item: 1.0):
        world = WorkerWorld(source=RewardDouble(judge))
        world.put(1)
        world.start()
        [group] = await world.delivered(1)
        await world.finish()
        for sample in group.samples:
            earned = None if sample.token_rewards is None else sample.token_rewards.tolist()
            assert earned == ([0.0, 2.0, 4.0, 6.0] if sample.reward == 12.0 else None)


def earning(rewards: list[float], of_tokens: list[list[float] | None]) -> Group:
    group = group_of(rewards=rewards, responses=[[8] * n for n in (3, 2, 4)][: len(rewards)])
    samples = [
        sample._replace(token_rewards=None if earned is None else np.array(earned, dtype=np.float32))
        for sample, earned in zip(group.samples, of_tokens, strict=True)
    ]
    return Group(header=group.header, prompt_ids=group.prompt_ids, samples=tuple(samples))


def through_the_wire(group: Group) -> Group:
    header, body = encode_group(group)
    return decode_body(decode_header(header), body)


def test_on_the_wire_a_sample_without_any_beside_one_with_some_has_zeros() -> None:
    group = through_the_wire(earning([1.0, 0.0], [[0.5, 0.0, 0.25], None]))
    assert [sample.token_rewards.tolist() for sample in group.samples if sample.token_rewards is not None] == [
        [0.5, 0.0, 0.25],
        [0.0, 0.0],
    ]


@pytest.mark.parametrize("earned", [[np.nan, 0.0, 0.0], [np.inf, 0.0, 0.0], [1.0, 2.0]])
def test_what_is_not_finite_or_not_one_for_each_token_is_refused(earned: list[float]) -> None:
    with pytest.raises(WireError, match="token rewards"):
        through_the_wire(earning([1.0, 0.0], [earned, None]))


def test_each_token_has_what_is_earned_from_it_on_less_what_others_earn_from_there() -> None:
    """Computed apart, token by token; the penalty, and what no token has earned, come with the last."""
    of_tokens = [[0.5, -1.0, 0.25], [2.0, 0.0], [0.0, 0.0, 1.0, -0.5]]
    rewards, penalties, discount = [1.0, 2.0, 0.5], [0.1, 0.0, 0.2], 0.5
    group = through_the_wire(earning(rewards, [list(earned) for earned in of_tokens]))
    settings = schema.Algorithm(advantages="tokens", advantages_args={"discount": discount})
    judged = make_algorithm(settings).advantages(group, np.array(penalties))

    to_go: list[list[float]] = []
    for earned, reward, penalty in zip(of_tokens, rewards, penalties, strict=True):
        own = list(earned)
        own[-1] += reward - penalty - sum(earned)
        to_go.append([sum(discount ** (m - t) * own[m] for m in range(t, len(own))) for t in range(len(own))])
    for i, values in enumerate(judged.values):
        others = [to_go[j] for j in range(3) if j != i]
        for t, value in enumerate(values):
            at = min(t, max(map(len, others)) - 1)
            from_there = [other[at] for other in others if len(other) > at]
            assert value == pytest.approx(to_go[i][t] - sum(from_there) / len(from_there), abs=1e-9)


def test_tokens_are_turns_of_one_token_and_so_their_gradient_is_unbiased() -> None:
    def as_tokens(group: ScoredGroup) -> list[npt.NDArray[np.float64]]:
        fields = {name: getattr(group, name) for name in group.__slots__}
        found = tokens(ScoredGroup(**{**fields, "token_rewards": group.turn_rewards}))
        for ours, theirs in zip(found, turns(group), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        return found

    likely, gradients = estimates(as_tokens)
    np.testing.assert_allclose(likely @ gradients, exact_gradient(), atol=1e-12)


def test_a_lone_teacher_learns_nothing_from_its_tokens() -> None:
    group = earning([1.0], [[1.0, 0.0, 0.0]])
    judged = make_algorithm(schema.Algorithm(advantages="tokens")).advantages(through_the_wire(group), np.zeros(1))
    assert judged.values[0].tolist() == [0.0, 0.0, 0.0]
