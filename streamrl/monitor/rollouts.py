"""The last groups that workers delivered, as people read them: prompt, completions, rewards, versions.

They are read from the stream while it holds them; what is committed is gone. The text is decoded with the model's
tokenizer.json where this machine has it, else token ids stand for it. Only reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from streamrl.errors import DataError, WireError
from streamrl.transport.keys import Keys
from streamrl.versions import show
from streamrl.wire.group import Group, decode_body, decode_header

MOST = 30
_SHOWN_TOKENS = 4_000

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One group, in a line."""

    id: str  # of its entry
    ticket: int
    worker: str
    error: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    versions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    text: str
    reward: float
    by_source: Mapping[str, float]
    num_tokens: int
    finish_reason: str
    versions: tuple[str, ...]  # in the order in which they made its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRollout:
    rollout: Rollout
    prompt: str
    completions: tuple[Completion, ...]


def list_rollouts(client: redis.Redis, keys: Keys, *, count: int = MOST) -> list[Rollout]:
    """The newest first; what cannot be read is left out."""
    entries: Any = client.xrevrange(keys.groups("train"), count=count)
    found: list[Rollout] = []
    for entry_id, fields in entries:
        with contextlib.suppress(WireError):
            found.append(_to_rollout(entry_id.decode(), fields))
    return found


def open_rollout(client: redis.Redis, keys: Keys, entry_id: str, decode: Decode) -> OpenRollout | None:
    """None: it has been committed meanwhile, or cannot be read."""
    entries: Any = client.xrange(keys.groups("train"), entry_id, entry_id)
    if not entries:
        return None
    try:
        fields = entries[0][1]
        group = decode_body(decode_header(fields.get(b"h", b"")), fields.get(b"b", b""))
        return _to_open(_to_rollout(entry_id, fields), group, decode)
    except WireError:
        return None


def find_decoder(config_json: str) -> Decode:
    """By the model's own tokenizer, if it is here."""
    from streamrl.record.words import find_words

    try:
        words = find_words(str(json.loads(config_json)["model"]["path"]))
    except (ValueError, KeyError, TypeError, DataError):
        words = None
    return words.decode if words is not None else lambda ids: " ".join(map(str, ids))


def _to_rollout(entry_id: str, fields: Mapping[bytes, bytes]) -> Rollout:
    header = decode_header(fields.get(b"h", b""))
    versions = dict.fromkeys(show(v) for v in (header.min_version, header.max_version) if v)
    return Rollout(
        id=entry_id,
        ticket=header.ticket,
        worker=header.worker,
        error=header.error,
        rewards=tuple(header.sample_rewards),
        lengths=tuple(header.sample_lengths),
        versions=" to ".join(versions),
    )


def _to_open(rollout: Rollout, group: Group, decode: Decode) -> OpenRollout:
    return OpenRollout(
        rollout=rollout,
        prompt=decode(group.prompt_ids[:_SHOWN_TOKENS].tolist()),
        completions=tuple(
            Completion(
                text=decode(sample.token_ids[:_SHOWN_TOKENS].tolist()),
                reward=sample.reward,
                by_source=dict(sample.rewards),
                num_tokens=len(sample.token_ids),
                finish_reason=sample.finish_reason,
                versions=tuple(dict.fromkeys(show(span.version) for span in sample.spans)),
            )
            for sample in group.samples
        ),
    )
