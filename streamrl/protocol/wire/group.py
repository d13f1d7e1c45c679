"""A group: the n scored samples of one ticket, or the word that the ticket failed.

Header and body go apart. The header, a message, is small and has what planning needs (lengths, versions, rewards); the
body has the arrays and is decoded only by the rank that trains on it. The header carries the body's digest.

The body has what samples are made of (`wire.sample`) by columns. What is large lies in front, raw and in this order,
and is used where it lies; the rest is a message (`wire.columns`):

    prompt_ids, token_ids, logprobs      one item a token         lengths are the header's

Behind that message lie the routes of mixtures of experts, where the engine was asked for them (`wire.routes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import MAX_KEPT_TOKENS
from streamrl.protocol.wire.checks import check_logprobs, check_tokens
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, fields_of, pack, unpack
from streamrl.protocol.wire.columns import pack_columns, unpack_samples
from streamrl.protocol.wire.routes import RouteCounts, Routes, RouteShape, pack_routes, take_counts, take_routes
from streamrl.protocol.wire.sample import Sample
from streamrl.protocol.wire.ticket import (
    IDENTITY_CHARS,
    MAX_SAMPLES,
    MAX_TOKENS,
    PURPOSES,
    Purpose,
)

MAX_HEADER_BYTES = 1 << 20
_ANY_VOCABULARY = 1 << 31
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")


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
    body = b"".join((*token_ids, *logprobs, pack(pack_columns(samples)), routes))
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
        samples = unpack_samples(f, header, token_ids[num_prompt:], logprobs, routed.of_samples)
    return Group(header=header, prompt_ids=token_ids[:num_prompt], samples=samples, prompt_routes=routed.of_prompt)


def _raw(dtype: np.dtype[Any], arrays: Sequence[npt.NDArray[Any]]) -> list[memoryview]:
    """As they lie in a body, which is joined from them."""
    return [array.astype(dtype, order="C", casting="same_kind", copy=False).data for array in arrays]
