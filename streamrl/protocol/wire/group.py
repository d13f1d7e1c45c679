"""A group: the n scored samples of one ticket, or the word that the ticket failed.

Header and body go apart. The header, a message, is small and has what planning needs (lengths, versions, rewards); the
body has the arrays and is decoded only by the rank that trains on it. The header carries the body's digest.

Per sample: token ids, a loss mask in runs (alternating lengths, trained tokens first), the behaviour's log-probs,
version spans, rewards by source, what each turn earned, finish reason. Tokens within a span were sampled; what lies
between spans was given, by an environment between two turns of the model, and never has a loss. Its log-probs are 0.
A rollout whose turns do not all go on behind one another has branches (`wire.branches`): several rows of one sample.
The body has all this by columns, all samples of a group in one array, so that a group is checked by a few looks at
large arrays. What is large lies in front, raw and in this order, and is used where it lies; the rest is a message:

    prompt_ids, token_ids, logprobs      one item a token         lengths are the header's

    integers           how many mask runs each sample has; how many spans; the runs of all; of all spans the versions,
                       the steps, the starts, the ends; where any sample has branches: how many each has, of all of
                       them the starts, the rows, how much they keep
    sources, fractions names; the totals of all samples, as the header says, but under the digest; then for each sample
                       and name a number: NaN where it has none of that source; then what each turn of each sample
                       earned, or nothing of all
    finish_reasons     one a sample, likewise as the header says
    token_rewards      f4 a token, where tokens earn (`wire.earned`); likewise teacher_logprobs (`wire.taught`)

Behind that message lie the routes of mixtures of experts, where the engine was asked for them (`wire.routes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import MAX_KEPT_TOKENS, Branch, take_branches
from streamrl.protocol.wire.checks import check_cover, check_logprobs, check_tokens
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, Fields, fields_of, pack, pack_numbers, unpack
from streamrl.protocol.wire.earned import Earned, pack_earned, take_earned
from streamrl.protocol.wire.routes import RouteCounts, Routes, RouteShape, pack_routes, take_counts, take_routes
from streamrl.protocol.wire.taught import Taught, pack_taught, take_taught
from streamrl.protocol.wire.ticket import (
    IDENTITY_CHARS,
    MAX_REWARD_SOURCES,
    MAX_SAMPLES,
    MAX_TOKENS,
    PURPOSES,
    Purpose,
)

FinishReason = Literal["stop", "length"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
MAX_HEADER_BYTES = 1 << 20
_MAX_SPANS = 4096
_ANY_VOCABULARY = 1 << 31
C = TypeVar("C", tuple[Any, ...], npt.NDArray[Any])
Ids = npt.NDArray[np.int32]
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


class Span(NamedTuple):
    """Tokens [start, end) of a sample were made by this version, which carries this optimizer step."""

    version: int
    step: int
    start: int
    end: int


class Sample(NamedTuple):
    """A row of the body's columns; named tuples, for many are built at a time."""

    token_ids: npt.NDArray[np.int32]  # [T] the response alone
    logprobs: npt.NDArray[np.float32]  # [T] of the distribution really sampled from
    mask_runs: tuple[int, ...]  # lengths, alternating trained / not trained, summing to T
    spans: tuple[Span, ...]  # in order; all that has a loss lies in one
    finish_reason: FinishReason
    rewards: Mapping[str, float]  # by source, before weights
    reward: float  # the weighted sum
    turn_rewards: tuple[float, ...] = ()  # what each of `turns()` has in it, after weights; none: only the whole earns
    branches: tuple[Branch, ...] = ()  # rows beside the first, in order
    token_rewards: Earned = None  # [T] likewise
    teacher_logprobs: Taught = None  # [T] of a teacher that the worker has asked
    routes: Routes | None = None  # [T, layers, experts a token] by which the engine made them

    def loss_mask(self) -> npt.NDArray[np.bool_]:  # [T]
        values = np.arange(len(self.mask_runs)) % 2 == 0
        return np.repeat(values, self.mask_runs)

    def num_context_tokens(self, num_prompt: int) -> int:
        """Of all rows, that were not sampled there."""
        sampled = sum(span.end - span.start for span in self.spans)
        return num_prompt + len(self.token_ids) - sampled + sum(branch.keep for branch in self.branches)

    def turns(self) -> list[tuple[int, int]]:
        """Where the model spoke: [start, end) of each turn, given tokens between them."""
        return turns_of(self.spans, self.branches)


def turns_of(spans: Iterable[Span], branches: Iterable[Branch]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    fresh = {branch.start for branch in branches}
    for span in spans:
        goes_on = bool(found) and found[-1][1] == span.start and span.start not in fresh
        begin = found.pop()[0] if goes_on else span.start
        found.append((begin, span.end))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    ticket: int
    identity: str  # of the ticket, as `wire.ticket` says
    run_uid: str
    purpose: Purpose
    attempt: int
    worker: str
    fingerprint: str  # of model shape and tokenizer: groups of another one are dropped
    # These, and the digest, are computed from the samples when the group is encoded.
    num_prompt_tokens: int = 0
    sample_lengths: tuple[int, ...] = ()  # [n]; empty when the ticket failed
    sample_rewards: tuple[float, ...] = ()  # [n] weighted totals
    sample_finished: tuple[bool, ...] = ()  # [n] ended by themselves
    num_kept_tokens: int = 0  # that branches of all samples repeat, prompts included
    min_version: int = 0  # over all spans; 0 when there are none
    max_version: int = 0
    num_failed_samples: int = 0
    error: str = ""  # why the ticket failed; empty for a group
    generate_s: float = 0.0
    reward_s: float = 0.0
    model_s: float = 0.0  # that a rollout waited for its turns, and for its environment: means over the samples
    environment_s: float = 0.0
    num_tool_calls: int = 0  # of all samples
    digest: int = 0  # xxh3_64 of the body
    routes: RouteCounts | None = None  # at its end

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(self.sample_lengths) + len(self.sample_lengths) * self.num_prompt_tokens + self.num_kept_tokens

    def facts(self) -> dict[str, Any]:
        """What JSON tells of a group beside its id, time, texts and tokens."""
        told = ("ticket", "run_uid", "worker", "attempt", "error", "num_failed_samples", "num_tool_calls")
        return {name: getattr(self, name) for name in (*told, "generate_s", "reward_s", "model_s", "environment_s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    header: GroupHeader
    prompt_ids: npt.NDArray[np.int32]  # [P]
    samples: tuple[Sample, ...] = field(default=())
    prompt_routes: Routes | None = None  # [P, layers, experts a token], where samples have theirs


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """(header, body); the header's digest, lengths and versions are computed here, from the body."""
    samples = group.samples
    token_ids = _raw(_I4, [group.prompt_ids, *(s.token_ids for s in samples)])
    logprobs = _raw(_F4, [s.logprobs for s in samples])
    num_prompt, lengths = len(group.prompt_ids), [len(s.token_ids) for s in samples]
    counts, routes = pack_routes(group.prompt_routes, [s.routes for s in samples], num_prompt, lengths)
    body = b"".join((*token_ids, *logprobs, pack(_columns(samples)), routes))
    versions = [span.version for s in samples for span in s.spans]
    computed = {
        "num_prompt_tokens": num_prompt,
        "sample_lengths": lengths,
        "sample_rewards": [float(s.reward) for s in samples],
        "sample_finished": [s.finish_reason == "stop" for s in samples],
        "num_kept_tokens": sum([branch.keep for s in samples for branch in s.branches]),
        "min_version": min(versions, default=0),
        "max_version": max(versions, default=0),
        "error": group.header.error[:2000],
        "digest": xxhash.xxh3_64_intdigest(body),
    }
    told = {**fields_of(group.header), **computed, "routes": counts}
    return pack({name: value for name, value in told.items() if value is not None}), body


def decode_header(data: bytes) -> GroupHeader:
    """A header or one WireError."""
    with unpack(data, max_bytes=MAX_HEADER_BYTES) as f:
        lengths = f.list("sample_lengths", int, max_items=MAX_SAMPLES)
        rewards = f.list("sample_rewards", float, max_items=MAX_SAMPLES)
        finished = f.list("sample_finished", bool, max_items=MAX_SAMPLES)
        if not len(lengths) == len(rewards) == len(finished):
            raise WireError("lengths, rewards and ends are of different numbers of samples")
        if not all(0 <= n <= MAX_TOKENS for n in lengths) or not all(map(math.isfinite, rewards)):
            raise WireError("a sample has an impossible number of tokens, or a reward that is not finite")
        header = GroupHeader(
            ticket=f.integer("ticket", low=0),
            identity=f.text("identity", max_chars=IDENTITY_CHARS),
            run_uid=f.text("run_uid", max_chars=64),
            purpose=f.one_of("purpose", PURPOSES),
            attempt=f.integer("attempt", low=0),
            worker=f.text("worker", max_chars=200),
            fingerprint=f.text("fingerprint", max_chars=64),
            num_prompt_tokens=f.integer("num_prompt_tokens", low=0, high=MAX_TOKENS),
            sample_lengths=tuple(lengths),
            sample_rewards=tuple(rewards),
            sample_finished=tuple(finished),
            num_kept_tokens=f.integer("num_kept_tokens", low=0, high=MAX_KEPT_TOKENS),
            min_version=f.integer("min_version", low=0),
            max_version=f.integer("max_version", low=0),
            num_failed_samples=f.integer("num_failed_samples", low=0, high=MAX_SAMPLES),
            error=f.text("error", max_chars=2000),
            generate_s=f.number("generate_s"),
            reward_s=f.number("reward_s"),
            model_s=f.number("model_s"),
            environment_s=f.number("environment_s"),
            num_tool_calls=f.integer("num_tool_calls", low=0, high=1 << 32),
            digest=f.integer("digest", low=0),
            routes=take_counts(f),
        )
    if header.failed == bool(lengths):
        raise WireError("a group has samples or an error, exactly one of them")
    return header


def decode_body(
    header: GroupHeader, body: bytes, *, vocabulary: int = _ANY_VOCABULARY, routes: RouteShape | None = None
) -> Group:
    """The arrays of a group whose header is known; verifies the digest, every count against the header, that all token
    ids are below `vocabulary`, and that routes are of such a model."""
    if xxhash.xxh3_64_intdigest(body) != header.digest:
        raise WireError(f"body of ticket {header.ticket} does not match its digest")
    num_prompt, num_tokens = header.num_prompt_tokens, sum(header.sample_lengths)
    num_bytes = _I4.itemsize * (num_prompt + num_tokens) + _F4.itemsize * num_tokens
    end = len(body) - (header.routes.num_bytes if header.routes else 0)
    if not num_bytes <= end <= MAX_MESSAGE_BYTES:
        raise WireError(f"a body of {len(body)} bytes, with {num_bytes} for its tokens, is not possible")
    token_ids = np.frombuffer(body, _I4, num_prompt + num_tokens)
    logprobs = np.frombuffer(body, _F4, num_tokens, offset=token_ids.nbytes)
    check_tokens(token_ids, vocabulary)
    check_logprobs(logprobs)
    routed = take_routes(header.routes, memoryview(body)[end:], num_prompt, header.sample_lengths, routes)
    with unpack(memoryview(body)[num_bytes:end]) as f:
        samples = _unpack_samples(f, header, token_ids[num_prompt:], logprobs, routed.of_samples)
    return Group(header=header, prompt_ids=token_ids[:num_prompt], samples=samples, prompt_routes=routed.of_prompt)


def _columns(samples: Sequence[Sample]) -> dict[str, object]:
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


def _raw(dtype: np.dtype[Any], arrays: Sequence[npt.NDArray[Any]]) -> list[memoryview]:
    """As they lie in a body, which is joined from them."""
    return [array.astype(dtype, order="C", casting="same_kind", copy=False).data for array in arrays]


def _unpack_samples(
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
