"""Reward functions as TRL's guide to its GRPO trainer describes them: its cases, with the scores that it tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ConfigError, RewardError
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Weighted
from tests.tiny_rewards import beginning, make_item

Start = Callable[..., Any]

CODE = r"""
import asyncio, re

def by_tokens(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

def by_characters(completions, **kwargs):
    return [len(completion) for completion in completions]

def thinks(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(bool(re.match(r"<think>.*</think><answer>.*</answer>$", text))) for text in texts]

def boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if match and match[1] == truth else 0.0 for match, truth in zip(found, ground_truth)]

def of_math(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]

def of_code(prompts, completions, task, **kwargs):
    return [-1.0 if t == "code" else None for t in task]

async def at_leisure(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def all_that_is_given(prompts, completions, completion_ids, **kwargs):
    assert prompts == [[{"role": "user", "content": "hi"}]]
    assert completions == [[{"role": "assistant", "content": "ho"}]]
    assert completion_ids == [[0, 1]]
    assert kwargs == {"level": [{"x": [1, 2]}], "completions_ids": [[0, 1]]}
    return [1.0]

def without_kwargs(completions, answer, *, scale=1.0, log_extra=None):
    return [scale * (completion == right) for completion, right in zip(completions, answer)]

def of_facts(completions, truncated, **kwargs):
    return [1.0 if truncated == [False] else 0.0 for _ in completions]

def ours(prompt, completion, token_ids, fields):
    return 0.5

def bad(completions, **kwargs):
    return {"number": 1.0, "none": [], "two": [1.0, 2.0], "text": ["1"], "nan": [float("nan")]}[completions[0]]

def of_the_trainer(completions, trainer_state, **kwargs):
    return [1.0]
"""


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "rewards.py").write_text(CODE)

    return beginning(tmp_path / "rewards.py")


def chat(completion: str) -> ScoreItem:
    return make_item(completion, prompt="<user>hi", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("function", "item", "score"),
    [
        ("by_tokens", make_item(" in the sky.", num_tokens=4), 4.0),
        ("by_characters", make_item(" blue."), 6.0),
        ("thinks", chat("<think>3 times 4 is 12</think><answer>12</answer>"), 1.0),
        ("thinks", chat("3 times 4 is 12."), 0.0),
        ("boxed", make_item(r" The solution is \boxed{2}.", ground_truth="2"), 1.0),
        ("boxed", make_item(r" The solution is \boxed{6}.", ground_truth="5"), 0.0),
        ("at_leisure", make_item("something"), 1.0),
        ("at_leisure", make_item(""), 0.0),
        ("of_math", make_item(task="math"), 1.0),
        ("of_math", make_item(task="code"), None),
    ],
)
async def test_the_examples_of_trls_guide_score_as_it_says(
    start: Start, function: str, item: ScoreItem, score: float | None
) -> None:
    async with start(function) as reward:
        assert await reward.score(item) == score


async def test_chats_come_as_messages_and_further_fields_as_lists(start: Start) -> None:
    item = make_item("ho", prompt="<user>hi", messages=[{"role": "user", "content": "hi"}], level={"x": [1, 2]})
    async with start("all_that_is_given") as reward:
        assert await reward.score(item) == 1.0


async def test_what_is_known_of_a_sample_is_not_hidden_by_a_column_of_that_name(start: Start) -> None:
    async with start("of_facts") as reward:
        assert await reward.score(make_item("ho", truncated="a column")) == 1.0


async def test_a_function_without_kwargs_gets_what_it_names_and_options_beside(start: Start) -> None:
    async with start("without_kwargs", options={"scale": 2.0}) as reward:
        assert await reward.score(make_item("4", answer="4", level=3)) == 2.0
        with pytest.raises(RewardError, match="without_kwargs takes 'answer', which the prompt's row lacks"):
            await reward.score(make_item("4", level=3))


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("number", "returned 1.0, not a list with a reward for each completion"),
        ("none", "returned 0 rewards for 1 completion"),
        ("two", "returned 2 rewards for 1 completion"),
        ("text", "returned '1', not a number"),
        ("nan", "returned nan, not a finite number"),
    ],
)
async def test_what_is_no_list_of_one_reward_fails_the_sample(start: Start, completion: str, reason: str) -> None:
    async with start("bad") as reward:
        with pytest.raises(RewardError, match=reason):
            await reward.score(make_item(completion))


@pytest.mark.parametrize(
    ("function", "settings", "reason"),
    [
        ("of_the_trainer", {}, "only TRL's trainer has 'trainer_state'; give it a default, trainer_state=None"),
        ("without_kwargs", {"options": {"speed": 1}}, "unexpected keyword argument 'speed'"),
    ],
)
async def test_what_nobody_can_give_is_refused_at_the_start(
    start: Start, function: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with start(function, **settings):
            pass


async def test_what_does_not_apply_counts_neither_in_the_sum_nor_by_source(start: Start) -> None:
    async with start("of_math") as math, start("of_code") as code, start("ours") as ours:
        sources = {"math": math, "code": code, "ours": ours}
        mixed = Rewards({name: Weighted(reward=reward, weight=2.0) for name, reward in sources.items()})
        about_math, about_code = await mixed.score(make_item(task="math")), await mixed.score(make_item(task="code"))
        assert (about_math.rewards, about_math.total) == ({"math": 1.0, "ours": 0.5}, 3.0)
        assert (about_code.rewards, about_code.total) == ({"code": -1.0, "ours": 0.5}, -1.0)


async def test_a_sample_to_which_nothing_applies_has_failed(start: Start) -> None:
    async with start("of_math") as math, start("of_code") as code:
        mixed = Rewards({name: Weighted(reward=one, weight=1.0) for name, one in (("math", math), ("code", code))})
        with pytest.raises(RewardError, match="no reward applies to this sample: math, code returned None for it"):
            await mixed.score(make_item(task="poetry"))
