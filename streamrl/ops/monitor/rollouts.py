"""The groups that workers delivered last, one line each, and a single one in full, as in `streamrl groups`.

Read from the stream while it holds them; committed ones are gone. If the stream is empty or gone, those that the
learner has kept in the run's folder. Only reads.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis
from rich.text import Text

from streamrl.errors import DataError, WireError
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.runs import Opened
from streamrl.ops.record.export import to_json
from streamrl.ops.record.kept import KeptGroups, lines_of_record
from streamrl.ops.record.view import TokenDecoder, find_decoder, lines_of
from streamrl.protocol.recording import open_group
from streamrl.protocol.transport.entries import to_entry
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import Group, decode_header
from streamrl.versions import show

_MAX_ROLLOUTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLine:
    """One group's line."""

    id: str  # stream entry id
    ticket: int
    worker: str
    error: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    versions: str


class Rollouts(Protocol):
    """The groups for display. None, or no lines: the group is gone, or cannot be read now."""

    def latest(self) -> Sequence[RolloutLine]: ...

    def to_json(self, entry_id: str) -> Mapping[str, Any] | None: ...

    def lines(self, entry_id: str, *, width: int, colour: bool) -> Sequence[Text]: ...


def rollouts_of(source: Opened | Remains) -> Rollouts:
    if isinstance(source, Remains):
        return KeptRollouts(source.folder)
    return LiveRollouts(source.client, source.keys, kept=KeptRollouts(source.folder) if source.folder else None)


class LiveRollouts:
    """Groups in the stream; `kept` is used for those that it no longer holds."""

    def __init__(self, client: redis.Redis, keys: Keys, *, kept: KeptRollouts | None = None) -> None:
        self._client, self._keys, self._kept = client, keys, kept
        self._decoder: TokenDecoder | None = None
        self._lock = threading.Lock()

    def latest(self) -> Sequence[RolloutLine]:
        with contextlib.suppress(redis.RedisError):
            if found := list_rollouts(self._client, self._keys):
                return found
        return self._kept.latest() if self._kept else []

    def to_json(self, entry_id: str) -> Mapping[str, Any] | None:
        found, decoder = self._open(entry_id)
        if found is None:
            return self._kept.to_json(entry_id) if self._kept else None
        return to_json(*found, decoder)

    def lines(self, entry_id: str, *, width: int, colour: bool) -> Sequence[Text]:
        found, decoder = self._open(entry_id)
        if found is None:
            return self._kept.lines(entry_id, width=width, colour=colour) if self._kept else ()
        return list(lines_of(*found, decoder, width=width, colour=colour, max_lines=None))

    def _open(self, entry_id: str) -> tuple[tuple[Entry, Group] | None, TokenDecoder | None]:
        with contextlib.suppress(redis.RedisError):
            with self._lock:  # load the tokenizer once
                if self._decoder is None:
                    self._decoder = find_decoder_of_run(self._client, self._keys)
            return open_rollout(self._client, self._keys, entry_id), self._decoder
        return None, None


class KeptRollouts:
    def __init__(self, folder: Path) -> None:
        self._kept = KeptGroups(folder)

    def latest(self) -> Sequence[RolloutLine]:
        return [_of_record(record) for record in reversed(self._kept.latest(_MAX_ROLLOUTS))]

    def to_json(self, entry_id: str) -> Mapping[str, Any] | None:
        with contextlib.suppress(DataError):
            return self._kept.find(entry_id)
        return None

    def lines(self, entry_id: str, *, width: int, colour: bool) -> Sequence[Text]:
        found = self.to_json(entry_id)
        return list(lines_of_record(found, width=width, max_lines=None)) if found else ()


def list_rollouts(client: redis.Redis, keys: Keys) -> list[RolloutLine]:
    """Return the newest groups first; unreadable ones are skipped."""
    entries: Any = client.xrevrange(keys.groups("train"), count=_MAX_ROLLOUTS)
    found: list[RolloutLine] = []
    for entry_id, fields in entries:
        with contextlib.suppress(WireError):
            found.append(_to_rollout(to_entry(entry_id, fields)))
    return found


def open_rollout(client: redis.Redis, keys: Keys, entry_id: str) -> tuple[Entry, Group] | None:
    """Open a group; None if it has been committed meanwhile, or cannot be read."""
    entries: Any = client.xrange(keys.groups("train"), entry_id, entry_id)
    if not entries:
        return None
    entry = to_entry(*entries[0])
    try:
        return entry, open_group(entry)
    except WireError:
        return None


def find_decoder_of_run(client: redis.Redis, keys: Keys) -> TokenDecoder | None:
    """Return the model's own tokenizer, if it is here; otherwise token ids are shown instead of text."""
    config: Any = client.hget(keys.meta, "config")
    try:
        return find_decoder(str(json.loads(config or b"")["model"]["path"]))
    except (ValueError, KeyError, TypeError, DataError):
        return None


def _to_rollout(entry: Entry) -> RolloutLine:
    header = decode_header(entry.header)
    versions = dict.fromkeys(show(v) for v in (header.min_version, header.max_version) if v)
    return RolloutLine(
        id=entry.id,
        ticket=header.ticket,
        worker=header.worker,
        error=header.error,
        rewards=tuple(header.sample_rewards),
        lengths=tuple(header.sample_lengths),
        versions=" to ".join(versions),
    )


def _of_record(record: Mapping[str, Any]) -> RolloutLine:
    spans = [span for sample in record["samples"] for span in sample["spans"]]
    return RolloutLine(
        id=record["id"],
        ticket=record["ticket"],
        worker=record["worker"],
        error=record["error"],
        rewards=tuple(sample["reward"] for sample in record["samples"]),
        lengths=tuple(max((span["end"] for span in sample["spans"]), default=0) for sample in record["samples"]),
        versions=", ".join(dict.fromkeys(span["version"] for span in spans)),
    )
