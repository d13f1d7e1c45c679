"""Scores the texts of `streamrl reward try`: rows and completions in, scores, errors and times out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.data.prompts import PromptRow
from streamrl.errors import DataError, RewardError, RewardOutage
from streamrl.extras import need
from streamrl.ops.cli.arguments import MovingLine

if TYPE_CHECKING:
    from streamrl.workers.rewards.base import GroupReward, Reward, ScoreItem

_NOT_ASKED = "not asked, because the row before found the service out"
Encode = Callable[[PromptRow, str], tuple[str, list[int], str]]  # (row, completion) -> (prompt, completion's ids, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    line: int  # of --data
    prompt: str
    completion: str
    score: float | None  # None: the function does not apply, or failed
    error: str | None
    seconds: float
    tests: tuple[dict[str, Any], ...] = ()  # for a source of type `code`: each test's result


def as_text(row: PromptRow, completion: str) -> tuple[str, list[int], str]:
    """Encode without a model: each byte is a token."""
    return row.plain, list(completion.encode()), ""


def encoder_of(model: str, date: str) -> Encode:
    """Encode as workers do, with the model's chat template and tokenizer."""
    need("--model", "transformers", extra="learner")
    from streamrl.chat_templates import TEMPLATE_ERRORS, render, renders_tools
    from streamrl.data.messages import read_tools
    from streamrl.encoding import Continuations
    from streamrl.learner.groups.prompts import Tokenizer
    from streamrl.workers.engines.model import read_model

    facts = read_model(model, trust_remote_code=False)
    tokenizer: Tokenizer = facts.tokenizer
    end, continuations = facts.after_an_answer(), Continuations(facts.tokenizer)

    def encode(row: PromptRow, completion: str) -> tuple[str, list[int], str]:
        if row.messages is not None and not tokenizer.chat_template:
            raise DataError(f"--model {model}: its tokenizer has no chat template, and line {row.line} is a chat")
        prompt = row.plain
        if row.messages is not None:
            tools = read_tools(row.fields.get("tools"))
            if tools and not renders_tools(tokenizer):
                raise DataError(f"--model {model}: its chat template does not render the 'tools' of line {row.line}")
            try:
                prompt = render(tokenizer, row.messages, date=date, tools=tools)
            except TEMPLATE_ERRORS as error:
                raise DataError(f"--model {model}: the chat template rejects line {row.line}: {error}") from None
        [token_ids] = continuations.encode([completion])
        return prompt, token_ids, end

    return encode


async def score_pairs(
    reward: Reward | GroupReward, pairs: Sequence[tuple[PromptRow, list[str]]], encode: Encode
) -> list[Tried]:
    """Start the reward, score the completions of each row, one group after the other, and close it."""
    from streamrl.workers.rewards.base import GroupReward, ScoreItem

    groups = [
        [
            (
                row,
                ScoreItem(
                    prompt=prompt,
                    completion=one,
                    token_ids=np.asarray(ids, dtype=np.int32),
                    fields=row.fields,
                    end=end,
                ),
            )
            for one in completions
            for prompt, ids, end in [encode(row, one)]
        ]
        for row, completions in pairs
    ]
    if not isinstance(reward, GroupReward):
        groups = [[one] for group in groups for one in group]
    line = MovingLine()
    try:
        await reward.start()
        tried: list[Tried] = []
        for number, group in enumerate(groups):
            line.show(f"{number} of {len(groups)}")
            began = time.monotonic()
            try:
                tried += await _score(reward, group)
            except RewardOutage as outage:  # each of the other rows would wait as long
                waited_s, others = time.monotonic() - began, chain.from_iterable(groups[number + 1 :])
                tried += [_tried(row, item, outage, seconds=waited_s) for row, item in group]
                return tried + [_tried(row, item, RewardError(_NOT_ASKED), seconds=0.0) for row, item in others]
        return tried
    finally:
        line.end()
        await reward.close()


async def _score(reward: Reward | GroupReward, group: Sequence[tuple[PromptRow, ScoreItem]]) -> list[Tried]:
    from streamrl.workers.rewards.base import GroupReward
    from streamrl.workers.rewards.code import CodeReward

    items = [item for _, item in group]
    scores: Sequence[float | RewardError | None]
    tests: list[tuple[dict[str, Any], ...]] = [()] * len(items)
    began = time.monotonic()
    try:
        if isinstance(reward, CodeReward):  # runs all tests, even after one fails
            judged = [await reward.judge(item) for item in items]
            scores = [reward.score_of(outcomes) for outcomes in judged]
            tests = [tuple(map(asdict, outcomes)) for outcomes in judged]
        elif isinstance(reward, GroupReward):
            scores = await reward.score_group(items)
        else:
            scores = await _alone(reward, items)
    except RewardOutage:
        raise
    except RewardError as failed:
        scores = [failed] * len(items)
    seconds = time.monotonic() - began
    return [
        _tried(row, item, score, seconds=seconds, tests=results)
        for (row, item), score, results in zip(group, scores, tests, strict=True)
    ]


def _tried(
    row: PromptRow,
    item: ScoreItem,
    score: float | RewardError | None,
    *,
    seconds: float,
    tests: tuple[dict[str, Any], ...] = (),
) -> Tried:
    return Tried(
        line=row.line,
        prompt=item.prompt,
        completion=item.completion,
        score=None if isinstance(score, RewardError) else score,
        error=str(score) if isinstance(score, RewardError) else None,
        seconds=seconds,
        tests=tests,
    )


async def _alone(reward: Reward, items: Sequence[ScoreItem]) -> list[float | None]:
    from streamrl.workers.rewards.mixing import worth_of

    scores = [await reward.score(item) for item in items]
    return [None if score is None else worth_of(score) for score in scores]
