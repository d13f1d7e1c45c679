"""A scored sample of a ticket, as the worker produced it and the learner trains on it; and its form in a group's body.

It has token ids, a loss mask in runs (alternating lengths, trained tokens first), the behaviour policy's logprobs,
version spans, rewards by source and by turn, and a finish reason. Tokens within a span were sampled; tokens between
spans came from an environment between two turns of the model, and never have a loss; their logprobs are 0. A rollout
whose turns do not all continue one another has branches (`wire.branches`): several rows of one sample.

The samples' data besides tokens and logprobs is a message in the group's body:

    rows               for each sample [mask runs, spans, finish reason, rewards by source, total, rewards of turns,
                       branches]; total and finish reason repeat the header's, here covered by the digest
    token_rewards      f4 per token of all samples, if tokens have rewards, else nil
    teacher_logprobs   f4 per token of all samples, if the run has a teacher that the worker asked, else nil
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import MAX_BRANCHES, Branch, check_branches
from streamrl.protocol.wire.codec import Count, Finite, Message, Messages, to_array
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.ticket import MAX_REWARD_SOURCES, MAX_SAMPLES

if TYPE_CHECKING:
    from streamrl.protocol.wire.group import GroupHeader

FinishReason = Literal["stop", "length"]
TokenRewards = npt.NDArray[np.float32] | None  # [T] of a sample; None: no rewards per token
TeacherLogprobs = npt.NDArray[np.float32] | None  # [T] of a sample, 0 for given tokens; None: no teacher

_MAX_SPANS = 4096
_F4, _UNSIGNED = np.dtype("<f4"), np.dtype("<u4")
_largest, _least = np.maximum.reduce, np.minimum.reduce  # an array's own methods add some microseconds of overhead


class Span(NamedTuple):
    """The version that sampled tokens [start, end), and its optimizer step."""

    version: Count
    step: Count
    start: Count
    end: Count


class Sample(NamedTuple):
    """A named tuple, because many are built at a time; `mask_runs` to `branches` form its row in the group's body."""

    token_ids: npt.NDArray[np.int32]  # [T] the response only
    logprobs: npt.NDArray[np.float32]  # [T] of the distribution that was sampled from
    mask_runs: tuple[int, ...]  # lengths, alternating trained / not trained, summing to T
    spans: tuple[Span, ...]  # in order; every token with a loss lies in one
    finish_reason: FinishReason
    rewards: Mapping[str, float]  # by source, before weights
    reward: float  # the weighted sum
    turn_rewards: tuple[float, ...] = ()  # the share of each of `turns()`, after weights; empty: no rewards by turn
    branches: tuple[Branch, ...] = ()  # rows beside the first, in order
    token_rewards: TokenRewards = None  # [T] the share of each token, after weights
    teacher_logprobs: TeacherLogprobs = None  # [T] if the worker asked a teacher
    routes: Routes | None = None  # [T, layers, experts a token] chosen by the engine

    def loss_mask(self) -> npt.NDArray[np.bool_]:  # [T]
        values = np.arange(len(self.mask_runs)) % 2 == 0
        return np.repeat(values, self.mask_runs)

    def num_context_tokens(self, num_prompt: int) -> int:
        """Tokens of all rows that were context there, not sampled."""
        sampled = sum(span.end - span.start for span in self.spans)
        return num_prompt + len(self.token_ids) - sampled + sum(branch.keep for branch in self.branches)

    def turns(self) -> list[tuple[int, int]]:
        """Return [start, end) of each turn of the model; given tokens separate them."""
        return turns_of(self.spans, self.branches)


def turns_of(spans: Iterable[Span], branches: Iterable[Branch]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    fresh = {branch.start for branch in branches}
    for span in spans:
        goes_on = bool(found) and found[-1][1] == span.start and span.start not in fresh
        begin = found.pop()[0] if goes_on else span.start
        found.append((begin, span.end))
    return found


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
    token_rewards: list[TokenRewards] = [s.token_rewards for s in samples]
    if any(rewards is not None for rewards in token_rewards):  # a sample to which no such source applies has none
        token_rewards = [np.zeros(n, _F4) if r is None else r for r, n in zip(token_rewards, lengths, strict=True)]
    rows = _Rows(
        rows=cast(list[_Row], [s[_IN_ROW] for s in samples]),
        token_rewards=_pack_column("token rewards", token_rewards, lengths),
        teacher_logprobs=_pack_column("teacher log-probs", [s.teacher_logprobs for s in samples], lengths),
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
        _take_column("token_rewards", found.token_rewards, lengths, _check_rewards),
        _take_column("teacher_logprobs", found.teacher_logprobs, lengths, check_logprobs),
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
        _check_cover(sample.mask_runs, sample.spans, length)
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


def _pack_column(
    what: str, of_samples: Sequence[npt.NDArray[np.float32] | None], lengths: Sequence[int]
) -> bytes | None:
    """Pack a number per token of all samples, or of none."""
    given = [each for each in of_samples if each is not None]
    if not given:
        return None
    if [len(each) for each in given] != list(lengths):
        raise WireError(f"a sample's {what} and tokens differ in number")
    return np.concatenate(given).astype(_F4).tobytes()


def _take_column(
    name: str, packed: bytes | None, lengths: Sequence[int], check: Callable[[npt.NDArray[np.float32]], None]
) -> Sequence[npt.NDArray[np.float32] | None]:
    if packed is None:
        return [None] * len(lengths)
    column = to_array(name, packed, _F4, count=sum(lengths))
    check(column)
    return np.split(column, np.cumsum(lengths)[:-1])


def check_tokens(token_ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    # As an unsigned number, a negative id is beyond every vocabulary.
    if len(token_ids) and _largest(token_ids.view(_UNSIGNED)) >= vocabulary:
        raise WireError(f"token ids must be from 0 to {vocabulary - 1}, as in the vocabulary")


def check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    # A NaN propagates through both reductions and fails both comparisons.
    if len(logprobs) and not (_least(logprobs) > -math.inf and _largest(logprobs) <= 1e-3):
        raise WireError("log-probs must be finite and at most 0")


def _check_rewards(token_rewards: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(token_rewards).all():
        raise WireError("token rewards must be finite")


def _check_cover(runs: Sequence[int], spans: Sequence[Span], length: int) -> None:
    """Raise WireError unless the spans are ordered, lie in the sample, and cover all tokens that have a loss."""
    if length and len(spans) == 1 and spans[0][2:] == (0, length):  # covers any runs
        return
    covered: list[tuple[int, int]] = []
    reached = 0
    for _, _, start, end in spans:
        if start < reached or end <= start:
            raise WireError("version spans must not overlap or be empty")
        covered.append((covered.pop()[0] if covered and start == reached else start, end))
        reached = end
    if reached > length:
        raise WireError(f"version spans reach to {reached} of {length} tokens")
    bounds = list(accumulate(runs, initial=0))
    for start, end in zip(bounds[:-1:2], bounds[1::2], strict=True):
        if start < end and not any(begin <= start and end <= until for begin, until in covered):
            raise WireError(f"tokens {start} to {end} have a loss but no version")


def _check_turns(samples: Sequence[Sample]) -> None:
    """Raise WireError unless all turns of all samples have a reward, or none has."""
    has_turn_rewards = any(map(_TURN_REWARDS, samples))
    if has_turn_rewards and any(len(s.turn_rewards) != len(turns_of(s.spans, s.branches)) for s in samples):
        raise WireError("a sample's turn rewards and turns differ in number")
