"""The samples' data besides tokens and logprobs: the message in a group's body, with a row per sample.

rows               [mask runs, spans, finish reason, rewards by source, total, rewards of turns, branches], as in
                   `wire.sample`; total and finish reason repeat the header's, here covered by the digest
token_rewards      f4 per token of all samples, if tokens have rewards (`wire.earned`), else nil
teacher_logprobs   f4 per token of all samples, if the run has a teacher (`wire.teacher_logprobs`), else nil
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import MAX_BRANCHES, Branch, check_branches
from streamrl.protocol.wire.checks import check_cover
from streamrl.protocol.wire.codec import Count, Finite, Message, Messages
from streamrl.protocol.wire.earned import pack_earned, take_earned
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.sample import FinishReason, Sample, Span, turns_of
from streamrl.protocol.wire.teacher_logprobs import pack_teacher_logprobs, take_teacher_logprobs
from streamrl.protocol.wire.ticket import MAX_REWARD_SOURCES, MAX_SAMPLES

if TYPE_CHECKING:
    from streamrl.protocol.wire.group import GroupHeader

_MAX_SPANS = 4096
_IN_ROW = slice(Sample._fields.index("mask_runs"), 1 + Sample._fields.index("branches"))
_Row: TypeAlias = tuple[
    tuple[Count, ...],
    Annotated[tuple[Span, ...], Meta(max_length=_MAX_SPANS)],
    FinishReason,
    Annotated[dict[str, Finite], Meta(max_length=MAX_REWARD_SOURCES)],
    Finite,
    tuple[Finite, ...],
    Annotated[tuple[Branch, ...], Meta(max_length=MAX_BRANCHES)],
]


class _Rows(Message, frozen=True, kw_only=True):
    rows: Annotated[list[_Row], Meta(max_length=MAX_SAMPLES)]
    token_rewards: bytes | None
    teacher_logprobs: bytes | None


_MESSAGES = Messages(_Rows)
_TURN_REWARDS = attrgetter("turn_rewards")


def pack_rows(samples: Sequence[Sample], lengths: Sequence[int]) -> bytes:
    """Pack everything that is not one item per token. WireError if it exceeds a limit of `unpack_samples`."""
    if list(lengths) != [len(s.logprobs) for s in samples]:  # concatenated, they would shift those of later samples
        raise WireError("a sample's log-probs and tokens differ in number")
    if not all(map(math.isfinite, chain.from_iterable([s.rewards.values() for s in samples]))):
        raise WireError("a reward is not a finite number")
    rows = _Rows(
        rows=cast(list[_Row], [s[_IN_ROW] for s in samples]),
        token_rewards=pack_earned([s.token_rewards for s in samples], lengths),
        teacher_logprobs=pack_teacher_logprobs([s.teacher_logprobs for s in samples], lengths),
    )
    _check_turns(samples)
    packed = _MESSAGES.pack(rows)
    _MESSAGES.unpack(packed)
    return packed


def unpack_samples(
    message: memoryview,
    header: GroupHeader,
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    routes: Sequence[Routes | None],
) -> tuple[Sample, ...]:
    found, lengths = _MESSAGES.unpack(message), header.sample_lengths
    if len(found.rows) != len(lengths):
        raise WireError(f"{len(found.rows)} samples, but the header says {len(lengths)}")
    of_tokens = zip(
        take_earned(found.token_rewards, lengths),
        take_teacher_logprobs(found.teacher_logprobs, lengths),
        routes,
        strict=True,
    )
    samples: list[Sample] = []
    end = num_kept = 0
    for length, row, others in zip(lengths, found.rows, of_tokens, strict=True):
        start, end = end, end + length
        sample = Sample(token_ids[start:end], logprobs[start:end], *row, *others)
        if sum(sample.mask_runs) != length:
            raise WireError(f"a loss mask covers {sum(sample.mask_runs)} tokens of {length}")
        check_cover(sample.mask_runs, sample.spans, length)
        if sample.branches:
            spans = [(span.start, span.end) for span in sample.spans]
            check_branches(sample.branches, num_prompt=header.num_prompt_tokens, num_tokens=length, spans=spans)
            num_kept += sum([branch.keep for branch in sample.branches])
        samples.append(sample)
    if num_kept != header.num_kept_tokens:
        raise WireError(f"branches keep {num_kept} tokens, not the {header.num_kept_tokens} that the header says")
    if tuple([s.reward for s in samples]) != header.sample_rewards:
        raise WireError("rewards of header and body differ")
    if tuple([s.finish_reason == "stop" for s in samples]) != header.sample_finished:
        raise WireError("finish reasons of header and body differ")
    _check_turns(samples)
    return tuple(samples)


def _check_turns(samples: Sequence[Sample]) -> None:
    """Raise WireError unless all turns of all samples have a reward, or none has."""
    has_turn_rewards = any(map(_TURN_REWARDS, samples))
    if has_turn_rewards and any(len(s.turn_rewards) != len(turns_of(s.spans, s.branches)) for s in samples):
        raise WireError("a sample's turn rewards and turns differ in number")
