"""What an evaluation says of its groups: rewards, passes, majorities, and what failed or was not answered."""

from __future__ import annotations

import pytest

from streamrl.config import schema
from streamrl.workers.eval_result import summarise
from tests.helpers import make_group, make_sample, make_ticket


def test_a_result_counts_what_failed_and_what_was_not_answered() -> None:
    groups = [
        make_group(make_ticket(0), samples=(make_sample(reward=1.0), make_sample(reward=0.0, finish_reason="length"))),
        make_group(make_ticket(1), samples=(make_sample(reward=2.0), make_sample(reward=2.0))),
        make_group(make_ticket(2), samples=(), error="no score"),
        None,
    ]

    result = summarise(groups, duration_s=1.0, settings=schema.Validation(), decode=str)

    assert (result.num_prompts, result.num_answered, result.num_failed) == (4, 2, 1)
    assert (result.reward, result.finished, result.num_samples) == (1.25, 0.75, 4)
    assert result.reward_error == pytest.approx(0.75)  # of the means 0.5 and 2


def test_a_prompt_with_failed_samples_weighs_as_much_as_others_and_is_missing_only_where_it_lacks_samples() -> None:
    groups = [
        make_group(make_ticket(0), samples=tuple(make_sample(reward=1.0, rewards={"right": 1.0}) for _ in range(4))),
        make_group(make_ticket(1), samples=(make_sample(reward=0.0, rewards={"right": 0.0}),)),
    ]
    settings = schema.Validation(pass_by="right", sampling=schema.ValidationSampling(num_samples=4, greedy=False))

    result = summarise(groups, duration_s=1.0, settings=settings, decode=str)

    assert (result.reward, result.rewards) == (0.5, {"right": 0.5})
    assert {k: one.share for k, one in result.pass_at.items()} == {1: 0.5, 2: 1.0, 4: 1.0}


def test_a_majority_of_samples_without_answers_is_wrong_and_without_a_pattern_there_is_none() -> None:
    groups = [make_group(make_ticket(0), samples=(make_sample(rewards={"right": 1.0}),))]
    settings = schema.Validation(pass_by="right", answer="no such answer")

    result = summarise(groups, duration_s=1.0, settings=settings, decode=str)

    assert result.majority is not None
    assert result.majority.share == 0.0
    without = settings.model_copy(update={"answer": None})
    assert summarise(groups, duration_s=1.0, settings=without, decode=str).majority is None


def test_nothing_answered_is_no_number() -> None:
    result = summarise([None, None], duration_s=1.0, settings=schema.Validation(), decode=str)
    assert (result.reward, result.reward_error, result.response_length, result.rewards) == (None, None, None, {})
