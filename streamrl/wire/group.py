"""A group: the n scored samples of one ticket, or the word that the ticket failed.

Header and body are two messages. The header is small and has what planning needs (lengths, versions, rewards); the
body has the arrays and is decoded only by the rank that trains on it. The header carries the body's digest.

Per sample: token ids, a loss mask in runs (alternating lengths, trained tokens first; tool and environment tokens fit
in without a new schema), the behaviour's log-probs, version spans, rewards by source, finish reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.errors import WireError
from streamrl.wire.codec import Fields, pack, unpack
from streamrl.wire.ticket import MAX_SAMPLES, PURPOSES, Purpose

FinishReason = Literal["stop", "length"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
MAX_HEADER_BYTES = 1 << 20
MAX_REWARD_SOURCES = 32
_MAX_SPANS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, end) of a sample were made by this version, which carries this optimizer step."""

    version: int
    step: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
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
    body = pack(
        {
            "prompt_ids": np.ascontiguousarray(group.prompt_ids, dtype="<i4").tobytes(),
            "samples": [_pack_sample(s) for s in group.samples],
        }
    )
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


def decode_body(header: GroupHeader, body: bytes) -> Group:
    """The arrays of a group whose header is known; verifies the digest and every count against the header."""
    if xxhash.xxh3_64_intdigest(body) != header.digest:
        raise WireError(f"body of ticket {header.ticket} does not match its digest")
    f = unpack(body)
    prompt_ids = f.array("prompt_ids", "<i4", count=header.num_prompt_tokens)
    packed = f.list("samples", max_items=MAX_SAMPLES)
    f.done()
    if len(packed) != len(header.sample_lengths):
        raise WireError(f"header promises {len(header.sample_lengths)} samples, the body has {len(packed)}")
    samples = tuple(_unpack_sample(s, n) for s, n in zip(packed, header.sample_lengths, strict=True))
    if tuple(s.reward for s in samples) != header.sample_rewards:
        raise WireError("rewards of header and body differ")
    if tuple(s.finish_reason == "stop" for s in samples) != header.sample_finished:
        raise WireError("finish reasons of header and body differ")
    return Group(header=header, prompt_ids=prompt_ids, samples=samples)


def _pack_sample(sample: Sample) -> dict[str, object]:
    return {
        "token_ids": np.ascontiguousarray(sample.token_ids, dtype="<i4").tobytes(),
        "logprobs": np.ascontiguousarray(sample.logprobs, dtype="<f4").tobytes(),
        "mask_runs": np.asarray(sample.mask_runs, dtype="<u4").tobytes(),
        "spans": np.asarray([(s.version, s.step, s.start, s.end) for s in sample.spans], dtype="<u8").tobytes(),
        "finish_reason": sample.finish_reason,
        "rewards": dict(sample.rewards),
        "reward": sample.reward,
    }


def _unpack_sample(packed: Any, length: int) -> Sample:
    if not isinstance(packed, dict):
        raise WireError("a sample must be a map")
    f = Fields(packed)
    logprobs = f.array("logprobs", "<f4", count=length)
    # A NaN fails the comparison too.
    if (length and not (logprobs <= 1e-3).all()) or np.isinf(logprobs).any():
        raise WireError("log-probs must be finite and at most 0")
    finish_reason = f.text("finish_reason", max_chars=16)
    if finish_reason not in FINISH_REASONS:
        raise WireError(f"unknown finish reason {finish_reason!r}")
    sample = Sample(
        token_ids=f.array("token_ids", "<i4", count=length),
        logprobs=logprobs,
        mask_runs=_unpack_runs(f, length),
        spans=_unpack_spans(f, length),
        finish_reason="stop" if finish_reason == "stop" else "length",
        rewards=_unpack_rewards(f),
        reward=f.number("reward"),
    )
    f.done()
    if length and int(sample.token_ids.min()) < 0:
        raise WireError("token ids must not be negative")
    return sample


def _unpack_rewards(f: Fields) -> dict[str, float]:
    sources = f.map("rewards")
    if len(sources.names()) > MAX_REWARD_SOURCES:
        raise WireError(f"more than {MAX_REWARD_SOURCES} reward sources")
    return {name: sources.number(name) for name in sources.names()}


def _unpack_runs(f: Fields, length: int) -> tuple[int, ...]:
    data = f.blob("mask_runs")
    if len(data) % 4:
        raise WireError("field 'mask_runs' is not whole")
    runs = tuple(int(n) for n in np.frombuffer(data, dtype="<u4"))
    if sum(runs) != length:
        raise WireError(f"loss mask covers {sum(runs)} of {length} tokens")
    return runs


def _unpack_spans(f: Fields, length: int) -> tuple[Span, ...]:
    data = f.blob("spans")
    if len(data) % 32 or len(data) > 32 * _MAX_SPANS:
        raise WireError("field 'spans' is not whole or too long")
    rows = np.frombuffer(data, dtype="<u8").reshape(-1, 4).tolist()
    spans = tuple(Span(version=v, step=t, start=a, end=b) for v, t, a, b in rows)
    reached = 0
    for span in spans:
        if span.start != reached or span.end <= span.start:
            raise WireError("version spans must follow one another without a gap")
        reached = span.end
    if reached != length:
        raise WireError(f"version spans cover {reached} of {length} tokens")
    return spans
