"""The trace of a rollout: whatever contexts it is told, each sampled token stands behind its own, once."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from streamrl.errors import SampleError
from streamrl.protocol.wire.branches import MAX_BRANCHES, MAX_KEPT_TOKENS, Branch
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.sample import Span
from streamrl.versions import make_version
from streamrl.workers.engines.base import Generated
from streamrl.workers.sessions.trace import Trace
from tests.brute_force import check_by_brute_force
from tests.helpers import make_group, make_ticket

PROMPT = [3, 4, 5]
LOGPROBS = random.Random(1)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def say(tokens: list[int], *, versions: tuple[int, ...] = (0,)) -> Generated:
    """By these versions, one after the other, as far as the tokens go."""
    cuts = sorted({len(tokens) * at // len(versions) for at in range(len(versions) + 1)})
    return Generated(
        token_ids=ids(tokens),
        logprobs=np.array([-LOGPROBS.random() - 0.01 for _ in tokens], np.float32),  # no two are the same
        text="",
        finish_reason="stop",
        spans=tuple(
            Span(version=make_version(1, v), step=v, start=a, end=b)
            for v, a, b in zip(versions, cuts, cuts[1:], strict=False)
        ),
    )


def test_in_500_random_trees_of_turns_each_sampled_token_stands_behind_its_context_once() -> None:
    """Contexts go on from the last turn, from an earlier one, from the middle of one; they are asked twice, cut down,
    or of another agent; few different tokens, so that by chance they share more than they know."""
    rng = random.Random(0)
    samples, num_branches = [], 0
    for _ in range(500):
        trace, said = Trace(ids(PROMPT)), []
        for _ in range(rng.randint(1, 8)):
            known = [PROMPT, *(context + made.token_ids.tolist() for context, made in said)]
            context = list(rng.choice([known[-1], known[-1], rng.choice(known)]))
            context = context[: rng.randint(0, len(context))] if rng.random() < 0.2 else context
            context = context or [rng.randint(0, 3)]
            context += [rng.randint(0, 3) for _ in range(rng.choice([0, 0, 1, 3, 6]))]
            tokens = [rng.randint(0, 3) for _ in range(rng.choice([0, 1, 2, 5]))]
            generated = say(tokens, versions=rng.choice([(0,), (1,), (1, 2)]))
            added = trace.num_tokens + trace.num_given(ids(context)) + len(tokens) if tokens else trace.num_tokens
            trace.take(ids(context), generated)
            assert trace.num_tokens == added
            said.append((context, generated))
        earned = [float(at) for at, (_, made) in enumerate(said) if len(made.token_ids)]
        played = trace.played("stop", 0.0, earned)
        sample = played.sample._replace(turn_rewards=played.turn_rewards)
        in_time = [token for _, made in said for token in made.token_ids.tolist()]
        assert played.last_id == (in_time[-1] if in_time else None)
        for (start, end), reward in zip(sample.turns(), sample.turn_rewards, strict=True):
            assert said[int(reward)][1].logprobs.tolist() == sample.logprobs[start:end].tolist(), "its own turn's"
        check_by_brute_force(PROMPT, sample, said)
        assert len(sample.turns()) == sum(len(made.token_ids) > 0 for _, made in said)
        assert trace.num_tokens == len(sample.token_ids)
        samples.append(sample)
        num_branches += len(sample.branches)
    assert num_branches > 500
    header, body = encode_group(make_group(make_ticket(1), samples=tuple(samples)))
    back = decode_body(decode_header(header), body).samples
    assert [each.branches for each in back] == [each.branches for each in samples]


def test_a_branch_shares_whole_turns_alone() -> None:
    trace = Trace(ids(PROMPT))
    trace.take(ids(PROMPT), say([6, 7]))
    trace.take(ids([*PROMPT, 6, 7, 8]), say([9]))
    trace.take(ids([*PROMPT, 6, 1]), say([9]))  # the first turn cut off in its middle
    trace.take(ids([*PROMPT, 6, 7, 2]), say([9]))  # the second question asked otherwise
    trace.take(ids([1, 1]), say([9]))  # somebody else
    branches = trace.played("stop", 0.0).sample.branches
    assert branches == (
        Branch(start=4, row=0, keep=3),
        Branch(start=7, row=0, keep=5),
        Branch(start=9, row=0, keep=0),
    )


def test_a_rollout_whose_contexts_have_nothing_in_common_ends() -> None:
    trace = Trace(ids(PROMPT))
    for at in range(MAX_BRANCHES):
        trace.take(ids([1000 + at]), say([1]))
    with pytest.raises(SampleError, match="a context other than the previous one"):
        trace.take(ids([1]), say([1]))


def test_a_rollout_whose_branches_repeat_more_than_its_share_of_a_group_ends() -> None:
    """A learner refuses a group whose branches repeat more: without this limit, all of its samples would be lost."""
    long, num_samples = ids([7] * 100_000), 4
    room = MAX_KEPT_TOKENS // num_samples // len(long)
    trace = Trace(long, num_samples=num_samples)
    for at in range(1 + room):  # the first is no branch
        trace.take(np.append(long, np.int32(1000 + at)), say([1]))
    sample = trace.played("stop", 0.0).sample
    group = make_group(make_ticket(1, token_ids=long), samples=(sample,) * num_samples)
    header, body = encode_group(replace(group, prompt_ids=long))
    assert decode_body(decode_header(header), body).header.num_kept_tokens <= MAX_KEPT_TOKENS
    with pytest.raises(
        SampleError, match=rf"repeat 42\d\d\d00 tokens; a group's 4 samples may repeat {MAX_KEPT_TOKENS}"
    ):
        trace.take(np.append(long, np.int32(1)), say([1]))
