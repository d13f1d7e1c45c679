"""Parses stream entries by the rules in docs/wire.md: tickets and groups. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np

Fields = Mapping[bytes, bytes]


class UnreadableError(ValueError):
    """The entry is malformed; whoever may write to the stream can write anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A ticket, as it was in its stream."""

    number: int
    run_uid: str
    prompt: str
    token_ids: tuple[int, ...]
    num_samples: int
    retry_of: int | None


class Span(NamedTuple):
    """Consecutive tokens of a sample with the same version."""

    version: int
    step: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A group, as it was in its stream."""

    number: int
    run_uid: str
    failed: bool
    num_prompt_tokens: int
    prompt_ids: tuple[int, ...]  # empty if only the header was read
    lengths: tuple[int, ...]  # tokens of each sample
    rewards: tuple[float, ...]  # of each sample
    spans: tuple[Span, ...]  # of all samples
    generate_s: float
    num_route_bytes: int = 0  # at the end of the body

    @property
    def num_samples(self) -> int:
        return len(self.lengths)


def name_of(fields: Fields) -> str:
    """Return a name that only equal fields share."""
    digest = hashlib.sha256()
    for name, value in sorted(fields.items()):
        digest.update(b"%d %d " % (len(name), len(value)) + name + value)
    return digest.hexdigest()


def read_ticket(fields: Fields) -> Asked:
    message = _unpack(fields.get(b"b", b""))
    try:
        found = _unpack(message["asked"])
        ids = np.frombuffer(found["token_ids"], "<i4")
        asked = Asked(
            number=_whole(found["number"]),
            run_uid=str(found["run_uid"]),
            prompt=str(found["prompt"]),
            token_ids=tuple(ids.tolist()),
            num_samples=_whole(found["num_samples"]),
            retry_of=None if found["retry_of"] < 0 else _whole(found["retry_of"]),
        )
        purpose = found["purpose"]
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"no ticket: {error!r}") from None
    if purpose != "train":
        raise UnreadableError(f"a ticket is for {purpose!r:.40}")
    _must_agree(fields, asked.number, asked.run_uid)
    return asked


def read_header(fields: Fields) -> Answered:
    """Read the header only; the body may be anything."""
    header = _unpack(fields.get(b"h", b""))
    try:
        answered = Answered(
            number=_whole(header["ticket"]),
            run_uid=str(header["run_uid"]),
            failed=bool(header["error"]),
            num_prompt_tokens=_whole(header["num_prompt_tokens"]),
            prompt_ids=(),
            lengths=tuple(map(_whole, header["sample_lengths"])),
            rewards=tuple(map(float, header["sample_rewards"])),
            spans=(),
            generate_s=float(header["generate_s"]),
            num_route_bytes=_whole((header["routes"] or [0])[0]),
        )
        purpose = header["purpose"]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableError(f"no header: {error!r}") from None
    rewards = answered.rewards
    if purpose != "train" or len(answered.lengths) != len(rewards) or not all(map(math.isfinite, rewards)):
        raise UnreadableError("a group of something else, or whose numbers do not agree")
    _must_agree(fields, answered.number, answered.run_uid)
    return answered


def read_group(fields: Fields) -> Answered:
    answered = read_header(fields)
    if answered.failed:
        return answered
    try:
        prompt_ids, spans = _read_body(fields.get(b"b", b""), answered)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableError(f"no body: {error!r}") from None
    return replace(answered, prompt_ids=prompt_ids, spans=spans)


def _read_body(body: bytes, header: Answered) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """Return (the prompt's tokens, the spans of all samples)."""
    lengths, num_prompt, num_tokens = header.lengths, header.num_prompt_tokens, sum(header.lengths)
    ids = np.frombuffer(body, "<i4", num_prompt + num_tokens)
    logprobs = np.frombuffer(body, "<f4", num_tokens, offset=ids.nbytes)
    rows = _unpack(body[ids.nbytes + logprobs.nbytes : len(body) - header.num_route_bytes])["rows"]
    if tuple(float(row[4]) for row in rows) != header.rewards:
        raise UnreadableError("header and body tell different rewards")
    if (ids < 0).any() or not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise UnreadableError("token ids or log-probs that cannot be")
    if tuple(sum(map(_whole, row[0])) for row in rows) != lengths:
        raise UnreadableError("mask runs are not of as many tokens as the header says")
    told = ([_whole(number) for number in span] for row in rows for span in row[1])
    spans = tuple(Span(version, step, end - start) for version, step, start, end in told)
    if sum(span.num_tokens for span in spans) > num_tokens:  # there may be fewer, if an environment gave some tokens
        raise UnreadableError("spans cover more than the tokens")
    return tuple(ids[:num_prompt].tolist()), spans


def _must_agree(fields: Fields, number: int, run_uid: str) -> None:
    if (fields.get(b"n"), fields.get(b"u")) != (str(number).encode(), run_uid.encode()):
        raise UnreadableError("the entry does not say of itself what its message says")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is no count")
    return value


def _unpack(data: bytes) -> dict[str, Any]:
    limits = {"max_array_len": 4096, "max_map_len": 64, "max_ext_len": 0}
    try:
        found = msgpack.unpackb(data, raw=False, strict_map_key=True, **limits)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise UnreadableError(f"no message: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise UnreadableError("no map")
    return found
