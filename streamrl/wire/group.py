"""A group: the n scored samples of one ticket, or the word that the ticket failed.

Header and body go apart. The header, a message, is small and has what planning needs (lengths, versions, rewards); the
body has the arrays and is decoded only by the rank that trains on it. The header carries the body's digest.

Per sample: token ids, a loss mask in runs (alternating lengths, trained tokens first; tool and environment tokens fit
in without a new schema), the behaviour's log-probs, version spans, rewards by source, finish reason. The body has them
by columns, all samples of a group in one array, so that a group is checked by a few looks at large arrays. What is
large lies in front, raw and in this order, and is used where it lies; the rest is a message behind it:

    prompt_ids, token_ids, logprobs      one item a token         lengths are the header's

    num_runs,  mask_runs     how many runs each sample has, and the runs of all
    num_spans, spans         likewise; a span is version, step, start, end
    sources,   rewards       names, and a number for each sample and name: NaN where a sample has none of that source
    totals, finish_reasons   one a sample, as the header says, but under the digest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.errors import WireError
from streamrl.wire.codec import MAX_MESSAGE_BYTES, Fields, pack, pack_numbers, unpack
from streamrl.wire.ticket import MAX_SAMPLES, PURPOSES, Purpose

FinishReason = Literal["stop", "length"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
MAX_HEADER_BYTES = 1 << 20
MAX_REWARD_SOURCES = 32
_MAX_SPANS = 4096
_ANY_VOCABULARY = 1 << 31
C = TypeVar("C", tuple[Any, ...], npt.NDArray[Any])
_I4, _U4, _F4 = (np.dtype(name) for name in ("<i4", "<u4", "<f4"))


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
    spans: tuple[Span, ...]  # cover [0, T) without gap
    finish_reason: FinishReason
    rewards: Mapping[str, float]  # by source, before weights
    reward: float  # the weighted sum

    def loss_mask(self) -> npt.NDArray[np.bool_]:  # [T]
        values = np.arange(len(self.mask_runs)) % 2 == 0
        return np.repeat(values, self.mask_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    ticket: int
    run_uid: str
    purpose: Purpose
    attempt: int
    worker: str
    fingerprint: str  # of model shape and tokenizer: groups of another one are dropped
    num_prompt_tokens: int
    sample_lengths: tuple[int, ...]  # [n]; empty when the ticket failed
    sample_rewards: tuple[float, ...]  # [n] weighted totals
    sample_finished: tuple[bool, ...]  # [n] ended by themselves
    min_version: int  # over all spans; 0 when there are none
    max_version: int
    num_failed_samples: int = 0
    error: str = ""  # why the ticket failed; empty for a group
    generate_s: float = 0.0
    reward_s: float = 0.0
    digest: int = 0  # xxh3_64 of the body

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def num_tokens(self) -> int:
        return sum(self.sample_lengths) + len(self.sample_lengths) * self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    header: GroupHeader
    prompt_ids: npt.NDArray[np.int32]  # [P]
    samples: tuple[Sample, ...] = field(default=())


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """(header, body); the header's digest, lengths and versions are computed here, from the body."""
    samples = group.samples
    token_ids = _joined(_I4, [group.prompt_ids, *(s.token_ids for s in samples)])
    logprobs = _joined(_F4, [s.logprobs for s in samples])
    body = b"".join((token_ids, logprobs, pack(_columns(samples))))
    h = group.header
    versions = [span.version for s in group.samples for span in s.spans]
    header = pack(
        {
            "ticket": h.ticket,
            "run_uid": h.run_uid,
            "purpose": h.purpose,
            "attempt": h.attempt,
            "worker": h.worker,
            "fingerprint": h.fingerprint,
            "num_prompt_tokens": len(group.prompt_ids),
            "sample_lengths": [len(s.token_ids) for s in group.samples],
            "sample_rewards": [float(s.reward) for s in group.samples],
            "sample_finished": [s.finish_reason == "stop" for s in group.samples],
            "min_version": min(versions, default=0),
            "max_version": max(versions, default=0),
            "num_failed_samples": h.num_failed_samples,
            "error": h.error[:2000],
            "generate_s": h.generate_s,
            "reward_s": h.reward_s,
            "digest": xxhash.xxh3_64_intdigest(body),
        }
    )
    return header, body


def decode_header(data: bytes) -> GroupHeader:
    """A header or one WireError."""
    f = unpack(data, max_bytes=MAX_HEADER_BYTES)
    purpose = f.text("purpose", max_chars=16)
    if purpose not in PURPOSES:
        raise WireError(f"unknown purpose {purpose!r}")
    lengths = f.list("sample_lengths", max_items=MAX_SAMPLES)
    if any(type(n) is not int or not 0 <= n <= 1 << 20 for n in lengths):
        raise WireError("field 'sample_lengths' must hold counts of tokens")
    rewards = f.list("sample_rewards", max_items=MAX_SAMPLES)
    if len(rewards) != len(lengths) or any(type(r) is not float or not math.isfinite(r) for r in rewards):
        raise WireError("field 'sample_rewards' must hold one finite number a sample")
    finished = f.list("sample_finished", max_items=MAX_SAMPLES)
    if len(finished) != len(lengths) or any(type(x) is not bool for x in finished):
        raise WireError("field 'sample_finished' must hold one truth value a sample")
    header = GroupHeader(
        ticket=f.integer("ticket", low=0),
        run_uid=f.text("run_uid", max_chars=64),
        purpose="train" if purpose == "train" else "eval",
        attempt=f.integer("attempt", low=0),
        worker=f.text("worker", max_chars=200),
        fingerprint=f.text("fingerprint", max_chars=64),
        num_prompt_tokens=f.integer("num_prompt_tokens", low=0, high=1 << 20),
        sample_lengths=tuple(lengths),
        sample_rewards=tuple(rewards),
        sample_finished=tuple(finished),
        min_version=f.integer("min_version", low=0),
        max_version=f.integer("max_version", low=0),
        num_failed_samples=f.integer("num_failed_samples", low=0, high=MAX_SAMPLES),
        error=f.text("error", max_chars=2000),
        generate_s=f.number("generate_s"),
        reward_s=f.number("reward_s"),
        digest=f.integer("digest", low=0),
    )
    f.done()
    if header.failed == bool(lengths):
        raise WireError("a group has samples or an error, exactly one of them")
    return header


def decode_body(header: GroupHeader, body: bytes, *, vocabulary: int = _ANY_VOCABULARY) -> Group:
    """The arrays of a group whose header is known; verifies the digest, every count against the header, and that all
    token ids are below `vocabulary`."""
    if xxhash.xxh3_64_intdigest(body) != header.digest:
        raise WireError(f"body of ticket {header.ticket} does not match its digest")
    num_prompt, num_tokens = header.num_prompt_tokens, sum(header.sample_lengths)
    num_bytes = _I4.itemsize * (num_prompt + num_tokens) + _F4.itemsize * num_tokens
    if not num_bytes <= len(body) <= MAX_MESSAGE_BYTES:
        raise WireError(f"a body of {len(body)} bytes, with {num_bytes} for its tokens, is not possible")
    token_ids = np.frombuffer(body, _I4, num_prompt + num_tokens)
    logprobs = np.frombuffer(body, _F4, num_tokens, offset=token_ids.nbytes)
    _check_tokens(token_ids, vocabulary)
    _check_logprobs(logprobs)
    f = unpack(memoryview(body)[num_bytes:])
    samples = _unpack_samples(f, header, token_ids[num_prompt:], logprobs)
    f.done()
    return Group(header=header, prompt_ids=token_ids[:num_prompt], samples=samples)


def _columns(samples: Sequence[Sample]) -> dict[str, object]:
    """All that is not an item a token."""
    for s in samples:
        if len(s.logprobs) != len(s.token_ids):  # laid end to end, the samples behind it would get wrong ones
            raise WireError(f"a sample has {len(s.logprobs)} log-probs for {len(s.token_ids)} tokens")
        if not all(map(math.isfinite, s.rewards.values())):
            raise WireError("a reward is not a finite number")
    sources = list(dict.fromkeys(source for s in samples for source in s.rewards))
    return {
        "num_runs": pack_numbers("I", [len(s.mask_runs) for s in samples]),
        "mask_runs": pack_numbers("I", [run for s in samples for run in s.mask_runs]),
        "num_spans": pack_numbers("I", [len(s.spans) for s in samples]),
        "spans": pack_numbers("Q", [part for s in samples for span in s.spans for part in span]),
        "sources": sources,
        "rewards": pack_numbers("d", [s.rewards.get(source, math.nan) for s in samples for source in sources]),
        "totals": pack_numbers("d", [s.reward for s in samples]),
        "finish_reasons": [s.finish_reason for s in samples],
    }


def _joined(dtype: np.dtype[Any], arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    return np.concatenate(arrays, dtype=dtype, casting="same_kind").tobytes() if arrays else b""


def _unpack_samples(
    f: Fields, header: GroupHeader, token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> tuple[Sample, ...]:
    lengths = header.sample_lengths
    totals = f.numbers("totals", "d", count=len(lengths))
    if totals != header.sample_rewards:
        raise WireError("rewards of header and body differ")
    reasons = f.list("finish_reasons", max_items=MAX_SAMPLES)
    if any(reason not in FINISH_REASONS for reason in reasons):
        raise WireError(f"finish reasons must be of {FINISH_REASONS}")
    if tuple(reason == "stop" for reason in reasons) != header.sample_finished:
        raise WireError("finish reasons of header and body differ")
    of_tokens = (_cut(token_ids, lengths), _cut(logprobs, lengths), _take_runs(f, lengths), _take_spans(f, lengths))
    columns = (*of_tokens, reasons, _take_rewards(f, len(lengths)), totals)
    return tuple(map(Sample._make, zip(*columns, strict=True)))


def _cut(column: C, lengths: Sequence[int]) -> list[C]:
    """What each sample has of it."""
    return [column[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def _check_tokens(token_ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    # As an unsigned number a negative one is beyond every vocabulary.
    if len(token_ids) and int(token_ids.view(_U4).max()) >= vocabulary:
        raise WireError(f"token ids are not all from 0 to {vocabulary - 1}, as the vocabulary has them")


def _check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    # A NaN is the result of both, and fails both comparisons.
    if len(logprobs) and not (logprobs.min() > -math.inf and logprobs.max() <= 1e-3):
        raise WireError("log-probs must be finite and at most 0")


def _take_rewards(f: Fields, num_samples: int) -> list[dict[str, float]]:
    sources = f.list("sources", max_items=MAX_REWARD_SOURCES)
    if any(type(source) is not str for source in sources) or len(set(sources)) != len(sources):
        raise WireError("reward sources must be different names")
    rewards = f.numbers("rewards", "d", count=num_samples * len(sources))
    if any(map(math.isinf, rewards)):
        raise WireError("rewards must be finite")
    rows = _cut(rewards, [len(sources)] * num_samples)
    return [{source: reward for source, reward in zip(sources, row, strict=True) if reward == reward} for row in rows]


def _take_runs(f: Fields, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    counts = f.numbers("num_runs", "I", count=len(lengths))
    runs = _cut(f.numbers("mask_runs", "I", count=sum(counts)), counts)
    covered = tuple(map(sum, runs))
    if covered != lengths:
        raise WireError(f"loss masks cover {covered} tokens of {lengths}")
    return runs


def _take_spans(f: Fields, lengths: Sequence[int]) -> list[tuple[Span, ...]]:
    counts = f.numbers("num_spans", "I", count=len(lengths))
    if max(counts, default=0) > _MAX_SPANS:
        raise WireError(f"more than {_MAX_SPANS} version spans in a sample")
    parts = f.numbers("spans", "Q", count=4 * sum(counts))
    spans = _cut(tuple(Span._make(parts[at : at + 4]) for at in range(0, len(parts), 4)), counts)
    for of_sample, length in zip(spans, lengths, strict=True):
        _check_cover(of_sample, length)
    return spans


def _check_cover(spans: Sequence[Span], length: int) -> None:
    reached = 0
    for _, _, start, end in spans:
        if start != reached or end <= start:
            raise WireError("version spans must follow one another without a gap")
        reached = end
    if reached != length:
        raise WireError(f"version spans cover {reached} of {length} tokens")
