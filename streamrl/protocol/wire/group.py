"""A group: the n scored samples of one ticket, or the error with which the ticket failed.

Header and body are sent apart. The header, a small message, has what planning needs (lengths, versions, rewards). The
body has the arrays; only the rank that trains on it decodes it. The header carries the body's digest.

The body holds the samples. The large arrays come first, raw and in this order, and are used in place; the rest is a
message with a row per sample (`wire.sample`):

    prompt_ids, token_ids, logprobs      one item a token         lengths are the header's

After that message come the routes of mixture-of-experts models, if the engine was asked for them (`wire.routes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta
from msgspec.structs import replace

from streamrl.errors import WireError
from streamrl.protocol.wire.branches import MAX_KEPT_TOKENS
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, Count, Finite, Message, Messages
from streamrl.protocol.wire.routes import RouteCounts, Routes, RouteShape, check_counts, pack_routes, take_routes
from streamrl.protocol.wire.sample import Sample, check_logprobs, check_tokens, pack_rows, unpack_samples
from streamrl.protocol.wire.ticket import (
    IDENTITY_CHARS,
    MAX_SAMPLES,
    MAX_TOKENS,
    Purpose,
)

MAX_HEADER_BYTES = 1 << 20
_ANY_VOCABULARY = 1 << 31
_MAX_ERROR_CHARS = 2000
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
T = TypeVar("T")
_NumTokens: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_OfEach: TypeAlias = Annotated[tuple[T, ...], Meta(max_length=MAX_SAMPLES)]


class GroupHeader(Message, frozen=True, kw_only=True):
    ticket: Count
    identity: Annotated[str, Meta(max_length=IDENTITY_CHARS)]  # of the ticket, see `wire.ticket`
    run_uid: Annotated[str, Meta(max_length=64)]
    purpose: Purpose
    attempt: Count
    worker: Annotated[str, Meta(max_length=200)]
    # Of model shape and tokenizer: groups with another fingerprint are dropped.
    fingerprint: Annotated[str, Meta(max_length=64)]
    # `encode_group` computes these, `min_version`, `max_version`, `digest` and `routes` from the samples.
    num_prompt_tokens: _NumTokens = 0
    sample_lengths: _OfEach[_NumTokens] = ()  # [n]; empty when the ticket failed
    sample_rewards: _OfEach[Finite] = ()  # [n] weighted totals
    sample_finished: _OfEach[bool] = ()  # [n] finish reason is "stop"
    # Tokens that the branches of all samples repeat, prompts included.
    num_kept_tokens: Annotated[int, Meta(ge=0, le=MAX_KEPT_TOKENS)] = 0
    min_version: Count = 0  # over all spans; 0 when there are none
    max_version: Count = 0
    num_failed_samples: Annotated[int, Meta(ge=0, le=MAX_SAMPLES)] = 0
    error: Annotated[str, Meta(max_length=_MAX_ERROR_CHARS)] = ""  # why the ticket failed; empty for a group
    generate_s: Finite = 0.0
    reward_s: Finite = 0.0
    model_s: Finite = 0.0  # time a rollout waited for its turns, and for its environment: means over the samples
    environment_s: Finite = 0.0
    num_tool_calls: Annotated[int, Meta(ge=0, le=1 << 32)] = 0  # over all samples
    digest: Count = 0  # xxh3_64 of the body
    routes: RouteCounts | None = None  # if any, at the body's end

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.sample_lengths) + len(self.sample_lengths) * self.num_prompt_tokens + self.num_kept_tokens

    def facts(self) -> dict[str, Any]:
        """Return what JSON output shows of a group besides its id, time, texts and tokens."""
        shown = ("ticket", "run_uid", "worker", "attempt", "error", "num_failed_samples", "num_tool_calls")
        return {name: getattr(self, name) for name in (*shown, "generate_s", "reward_s", "model_s", "environment_s")}


_HEADERS = Messages(GroupHeader, max_bytes=MAX_HEADER_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    header: GroupHeader
    prompt_ids: npt.NDArray[np.int32]  # [P]
    samples: tuple[Sample, ...] = field(default=())
    prompt_routes: Routes | None = None  # [P, layers, experts a token], if the samples have routes


def encode_group(group: Group) -> tuple[bytes, bytes]:
    """Encode to (header, body); computes the header's digest, lengths and versions from the body.

    WireError if the group exceeds a limit, so that no worker delivers what every learner would refuse.
    """
    samples = group.samples
    num_prompt, lengths = len(group.prompt_ids), [len(s.token_ids) for s in samples]
    counts, routes = pack_routes(group.prompt_routes, [s.routes for s in samples], num_prompt, lengths)
    token_ids = _raw(_I4, [group.prompt_ids, *[s.token_ids for s in samples]])
    logprobs = _raw(_F4, [s.logprobs for s in samples])
    body = b"".join([*token_ids, *logprobs, pack_rows(samples, lengths), routes])
    if (num_bytes := len(body) - len(routes)) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a group of {num_bytes} bytes; the limit is {MAX_MESSAGE_BYTES}: make sampling.num_samples or "
            "sampling.max_tokens smaller"
        )
    versions = [span.version for s in samples for span in s.spans]
    header = replace(
        group.header,
        num_prompt_tokens=num_prompt,
        sample_lengths=tuple(lengths),
        sample_rewards=tuple([float(s.reward) for s in samples]),
        sample_finished=tuple([s.finish_reason == "stop" for s in samples]),
        num_kept_tokens=sum([branch.keep for s in samples for branch in s.branches]),
        min_version=min(versions, default=0),
        max_version=max(versions, default=0),
        error=group.header.error[:_MAX_ERROR_CHARS],
        digest=xxhash.xxh3_64_intdigest(body),
        routes=counts,
    )
    packed = _HEADERS.pack(header)
    _HEADERS.unpack(packed)
    return packed, body


def decode_header(data: bytes) -> GroupHeader:
    """Decode a header, or raise WireError."""
    header = _HEADERS.unpack(data)
    if not len(header.sample_lengths) == len(header.sample_rewards) == len(header.sample_finished):
        raise WireError("lengths, rewards and finish flags differ in their number of samples")
    if header.failed == bool(header.sample_lengths):
        raise WireError("a group must have either samples or an error")
    if header.routes is not None:
        check_counts(header.routes)
    return header


def decode_body(
    header: GroupHeader, body: bytes, *, vocabulary: int = _ANY_VOCABULARY, routes: RouteShape | None = None
) -> Group:
    """Decode the arrays of a group whose header is known.

    Verifies the digest, every count against the header, that all token ids are below `vocabulary`, and that the routes
    fit the model's shape.
    """
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
    samples = unpack_samples(
        memoryview(body)[num_bytes:end], header, token_ids[num_prompt:], logprobs, routed.of_samples
    )
    return Group(header=header, prompt_ids=token_ids[:num_prompt], samples=samples, prompt_routes=routed.of_prompt)


def _raw(dtype: np.dtype[Any], arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
    """Convert the arrays to the body's dtype and layout."""
    return [array.astype(dtype, order="C", casting="same_kind", copy=False) for array in arrays]
