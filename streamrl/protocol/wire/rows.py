"""What samples have beside tokens and log-probs, by columns: all samples of a group in one array, so that a group is
checked by a few looks at large arrays.

    integers           how many mask runs each sample has; how many spans; the runs of all; of all spans the versions,
                       the steps, the starts, the ends; where any sample has branches: how many each has, of all of
                       them the starts, the rows, how much they keep
    sources, fractions names; the totals of all samples, as the header says, but under the digest; then for each sample
                       and name a number: NaN where it has none of that source; then what each turn of each sample
                       earned, or nothing of all
    finish_reasons     one a sample, likewise as the header says
    token_rewards      f4 a token, where tokens earn (`wire.earned`); likewise teacher_logprobs (`wire.taught`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import Branch, take_branches
from streamrl.protocol.wire.checks import check_cover
from streamrl.protocol.wire.codec import Fields, pack_numbers
from streamrl.protocol.wire.earned import pack_earned, take_earned
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.sample import FINISH_REASONS, Sample, Span, turns_of
from streamrl.protocol.wire.taught import pack_taught, take_taught
from streamrl.protocol.wire.ticket import MAX_REWARD_SOURCES, MAX_SAMPLES

if TYPE_CHECKING:
    from streamrl.protocol.wire.group import GroupHeader

_MAX_SPANS = 4096
C = TypeVar("C", tuple[Any, ...], npt.NDArray[Any])
Ids = npt.NDArray[np.int32]


def pack_columns(samples: Sequence[Sample]) -> dict[str, object]:
    """All that is not an item a token."""
    lengths = [len(s.token_ids) for s in samples]
    if lengths != [len(s.logprobs) for s in samples]:  # laid end to end, the samples behind it would get wrong ones
        raise WireError("a sample has not as many log-probs as tokens")
    if not all(map(math.isfinite, [reward for s in samples for reward in s.rewards.values()])):
        raise WireError("a reward is not a finite number")
    turn_rewards = [reward for s in samples for reward in s.turn_rewards]
    if turn_rewards and any(len(s.turn_rewards) != len(s.turns()) for s in samples):
        raise WireError("a sample has not as many rewards of turns as turns")
    spans = [span for s in samples for span in s.spans]
    sources = list(dict.fromkeys([source for s in samples for source in s.rewards]))
    counts = [len(s.mask_runs) for s in samples] + [len(s.spans) for s in samples]
    runs = [run for s in samples for run in s.mask_runs]
    rewards = [s.rewards.get(source, math.nan) for s in samples for source in sources]
    branches = [branch for s in samples for branch in s.branches]
    tail = [*(len(s.branches) for s in samples), *chain.from_iterable(zip(*branches, strict=True))] if branches else []
    return {
        "integers": pack_numbers("Q", [*counts, *runs, *chain.from_iterable(zip(*spans, strict=True)), *tail]),
        "sources": sources,
        "fractions": pack_numbers("d", [*(s.reward for s in samples), *rewards, *turn_rewards]),
        "finish_reasons": [s.finish_reason for s in samples],
        **pack_earned([s.token_rewards for s in samples], lengths),
        **pack_taught([s.teacher_logprobs for s in samples], lengths),
    }


def unpack_samples(
    f: Fields, header: GroupHeader, token_ids: Ids, logprobs: npt.NDArray[np.float32], routes: Sequence[Routes | None]
) -> tuple[Sample, ...]:
    lengths = header.sample_lengths
    runs, spans, branches = _take_integers(f, header)
    rewards, totals, turn_rewards = _take_fractions(f, spans, branches)
    if totals != header.sample_rewards:
        raise WireError("rewards of header and body differ")
    reasons = f.list("finish_reasons", str, max_items=MAX_SAMPLES)
    if any(reason not in FINISH_REASONS for reason in reasons):
        raise WireError(f"finish reasons must be of {FINISH_REASONS}")
    if tuple([reason == "stop" for reason in reasons]) != header.sample_finished:
        raise WireError("finish reasons of header and body differ")
    columns = (_cut(token_ids, lengths), _cut(logprobs, lengths), runs, spans, reasons, rewards, totals)
    earned = take_earned(f, lengths)
    taught = take_taught(f, lengths)
    return tuple(map(Sample._make, zip(*columns, turn_rewards, branches, earned, taught, routes, strict=True)))


def _cut(column: C, lengths: Sequence[int]) -> list[C]:
    """What each sample has of it."""
    return [column[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _take_fractions(
    f: Fields, spans: Sequence[Sequence[Span]], branches: Sequence[Sequence[Branch]]
) -> tuple[list[dict[str, float]], tuple[float, ...], list[tuple[float, ...]]]:
    """(rewards by source, totals, rewards of turns)"""
    num_samples = len(spans)
    sources = f.list("sources", str, max_items=MAX_REWARD_SOURCES)
    if len(set(sources)) != len(sources):
        raise WireError("reward sources must be different names")
    fractions = f.numbers("fractions", "d")
    whole = num_samples * (1 + len(sources))
    totals, rewards, of_turns = fractions[:num_samples], fractions[num_samples:whole], fractions[whole:]
    num_turns = [len(turns_of(*of_sample)) if of_turns else 0 for of_sample in zip(spans, branches, strict=True)]
    if len(fractions) != whole + sum(num_turns):
        raise WireError(f"{len(fractions)} rewards, neither {whole} of samples nor {sum(num_turns)} of turns more")
    if any(map(math.isinf, rewards)) or not all(map(math.isfinite, of_turns)):
        raise WireError("rewards must be finite")
    in_order = iter(rewards)
    by_source = [dict(zip(sources, in_order, strict=False)) for _ in range(num_samples)]
    if any(map(math.isnan, rewards)):
        by_source = [{source: reward for source, reward in row.items() if reward == reward} for row in by_source]
    return by_source, totals, _cut(of_turns, num_turns)


def _take_integers(
    f: Fields, header: GroupHeader
) -> tuple[list[tuple[int, ...]], list[tuple[Span, ...]], list[tuple[Branch, ...]]]:
    """(mask runs, spans, branches) of each sample"""
    lengths = header.sample_lengths
    integers, num_samples = f.numbers("integers", "Q"), len(lengths)
    num_runs, num_spans = integers[:num_samples], integers[num_samples : 2 * num_samples]
    if max(num_spans, default=0) > _MAX_SPANS:
        raise WireError(f"more than {_MAX_SPANS} version spans in a sample")
    begin, count = 2 * num_samples + sum(num_runs), sum(num_spans)
    end = begin + 4 * count
    if len(integers) < end:
        raise WireError(f"{len(integers)} integers where the mask runs and version spans need {end}")
    runs = _cut(integers[2 * num_samples : begin], num_runs)
    if (covered := tuple(map(sum, runs))) != lengths:
        raise WireError(f"loss masks cover {covered} tokens of {lengths}")
    columns = (integers[at : at + count] for at in range(begin, end, count or 1))
    spans = _cut(tuple(map(Span, *columns)) if count else (), num_spans)
    check_cover(runs, spans, lengths)
    num_prompt, num_kept = header.num_prompt_tokens, header.num_kept_tokens
    branches = take_branches(integers[end:], lengths, spans, num_prompt=num_prompt, num_kept=num_kept)
    return runs, spans, branches
