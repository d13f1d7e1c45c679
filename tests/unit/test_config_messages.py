"""Settings that allow what no message can carry are refused before anybody makes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from tests.config_world import problems
from tests.helpers import make_group, make_sample, make_ticket


def test_a_group_that_would_be_too_large_for_a_message_is_refused_before_anybody_makes_it(good: Path) -> None:
    [problem] = problems(good, "sampling.num_samples=64", "sampling.max_tokens=131072")
    limit = int(problem.rpartition("at most ")[2].partition(":")[0])
    assert problem.startswith("sampling.max_tokens = 131072: ")
    assert problems(good, "sampling.num_samples=64", f"sampling.max_tokens={limit}") == []
    assert len(problems(good, "sampling.num_samples=64", f"sampling.max_tokens={limit + 1}")) == 1

    samples = tuple(largest_sample(limit, step) for step in range(64))
    ticket = make_ticket(0, num_samples=64, token_ids=np.zeros(1024, np.int32))
    header, body = encode_group(make_group(ticket, samples=samples))
    assert len(body) > MAX_MESSAGE_BYTES - (8 << 20)
    assert decode_body(decode_header(header), body).header.ticket == 0


PER_TOKEN = "rewards.own={type: function, target: own.py:f, per_token: true}"


@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        (["teacher.urls=[http://teacher:8000]"], ["teacher_logprobs"]),
        ([PER_TOKEN], ["token_rewards"]),
        (["teacher.urls=[http://teacher:8000]", PER_TOKEN], ["teacher_logprobs", "token_rewards"]),
    ],
)
def test_what_a_teacher_and_rewards_per_token_add_to_a_group_counts(
    good: Path, overrides: list[str], beside: list[str]
) -> None:
    (good.parent / "own.py").write_text("def f(**_): ...\n")
    key, plain = "sampling.max_tokens", 122_000
    sampling = ["sampling.num_samples=64"]
    assert problems(good, *sampling, f"{key}={plain}") == []
    [problem] = problems(good, *sampling, *overrides, f"{key}={plain}")
    limit = int(problem.rpartition("at most ")[2].partition(":")[0])
    assert problem.startswith(f"{key} = {plain}: ")
    assert problems(good, *sampling, *overrides, f"{key}={limit}") == []

    of_tokens = {name: -np.ones(limit, np.float32) for name in beside}
    samples = tuple(largest_sample(limit, step, **of_tokens) for step in range(64))
    ticket = make_ticket(0, num_samples=64, token_ids=np.zeros(1024, np.int32))
    header, body = encode_group(make_group(ticket, samples=samples))
    assert len(body) > MAX_MESSAGE_BYTES - (8 << 20)
    assert decode_body(decode_header(header), body).header.ticket == 0


def test_only_samples_to_train_on_are_shown_to_a_teacher(good: Path) -> None:
    held_out = ["validation.sampling.num_samples=64", "validation.sampling.greedy=false"]
    settings = [*held_out, "validation.sampling.max_tokens=122000", "teacher.urls=[http://teacher:8000]"]
    assert problems(good, *settings) == []


def test_there_are_no_more_reward_sources_than_a_group_may_name(good: Path) -> None:
    sources = [f"rewards.r{number}={{type: function, target: exact_match}}" for number in range(32)]
    assert problems(good, *sources[:31]) == []
    [problem] = problems(good, *sources)
    assert problem.startswith("rewards = 33: ")
    assert "at most 32" in problem


def largest_sample(num_tokens: int, step: int, **of_tokens: np.ndarray) -> Sample:
    """With a new version of the weights after every 1,000 tokens, and all reward sources."""
    starts = range(0, num_tokens, 1000)
    spans = (Span(version=step, step=step, start=at, end=min(at + 1000, num_tokens)) for at in starts)
    rewards = {f"reward of source {number}": 1.0 for number in range(32)}
    return make_sample(num_tokens=num_tokens, spans=tuple(spans), rewards=rewards, **of_tokens)
