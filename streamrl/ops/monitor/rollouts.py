"""The last groups that workers delivered, a line each, and one of them in full, as `streamrl groups` reads it.

They are read from the stream while it holds them; what is committed is gone. Only reads.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import redis

from streamrl.errors import DataError, WireError
from streamrl.ops.record.recording import open_group
from streamrl.ops.record.view import TokenDecoder, find_decoder
from streamrl.protocol.transport.entries import to_entry
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import Group, decode_header
from streamrl.versions import show

_MOST = 30


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


def list_rollouts(client: redis.Redis, keys: Keys) -> list[Rollout]:
    """The newest first; what cannot be read is left out."""
    entries: Any = client.xrevrange(keys.groups("train"), count=_MOST)
    found: list[Rollout] = []
    for entry_id, fields in entries:
        with contextlib.suppress(WireError):
            found.append(_to_rollout(to_entry(entry_id, fields)))
    return found


def open_rollout(client: redis.Redis, keys: Keys, entry_id: str) -> tuple[Entry, Group] | None:
    """None: it has been committed meanwhile, or cannot be read."""
    entries: Any = client.xrange(keys.groups("train"), entry_id, entry_id)
    if not entries:
        return None
    entry = to_entry(*entries[0])
    try:
        return entry, open_group(entry)
    except WireError:
        return None


def find_decoder_of_run(client: redis.Redis, keys: Keys) -> TokenDecoder | None:
    """By the model's own tokenizer, if it is here; else token ids stand for the text."""
    config: Any = client.hget(keys.meta, "config")
    try:
        return find_decoder(str(json.loads(config or b"")["model"]["path"]))
    except (ValueError, KeyError, TypeError, DataError):
        return None


def _to_rollout(entry: Entry) -> Rollout:
    header = decode_header(entry.header)
    versions = dict.fromkeys(show(v) for v in (header.min_version, header.max_version) if v)
    return Rollout(
        id=entry.id,
        ticket=header.ticket,
        worker=header.worker,
        error=header.error,
        rewards=tuple(header.sample_rewards),
        lengths=tuple(header.sample_lengths),
        versions=" to ".join(versions),
    )
