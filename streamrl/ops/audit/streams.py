"""The contents of a run's streams, entry by entry, as XRANGE returns them.

Tickets are scanned before groups: a delivery moves a ticket from the former to the latter and never back, so one that
moves meanwhile is seen at least once. Only reads, with a client that never retries; blocks for some seconds at most.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamrl.errors import ResourceError, WireError
from streamrl.ops.audit.commit import EntryId, parse_id
from streamrl.protocol.transport.clients import open_client, server_name
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.wire.group import decode_body, decode_header
from streamrl.protocol.wire.ticket import decode_ticket

_ENTRIES_A_PAGE = 100
_CONNECT_TIMEOUT_S = 5.0
_REPLY_TIMEOUT_S = 15.0
_MAX_WINDOW = 1_000_000  # of outstanding tickets, if the run's configuration does not say

RawEntry = tuple[EntryId, Mapping[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    server: str | None = None  # None: not read, so nothing is known
    learner_is_live: bool = False
    issued: int | None = None  # the next training ticket's number, from the learner; None: not recorded
    issued_since: int = 0  # tickets issued while the streams were read
    window: int = _MAX_WINDOW  # the most tickets that the run keeps outstanding
    tickets: tuple[tuple[int, str], ...] = ()  # number and identity of the entries that ask for a training group
    groups: tuple[tuple[EntryId, int, str], ...] = ()  # those that answer a ticket, or report its failure
    malformed: Mapping[str, int] = field(default_factory=dict)
    dead_letters: int = 0
    eval_tickets: int = 0
    eval_groups: int = 0


@contextmanager
def open_server(url: str) -> Iterator[redis.Redis]:
    client = open_client(
        url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_REPLY_TIMEOUT_S,
    )
    with client:
        try:
            yield client
        except redis.RedisError as error:
            raise ResourceError(f"Redis at {server_name(client)} does not answer: {error}") from None


def read_meta(client: redis.Redis, keys: Keys) -> Mapping[bytes, bytes]:
    """Read the run's hash. ResourceError if the server does not know the run."""
    meta: Any = client.hgetall(keys.meta)
    if b"uid" not in meta:
        removed = "; it was removed" if client.exists(keys.tombstone) else ""
        raise ResourceError(f"Redis at {server_name(client)} holds no run {keys.name!r}{removed}")
    return dict(meta)


def read_streams(client: redis.Redis, keys: Keys, *, run_uid: str) -> Streams:
    meta = read_meta(client, keys)
    if meta[b"uid"] != run_uid.encode():
        uid = meta[b"uid"].decode(errors="replace")
        raise ResourceError(
            f"Redis at {server_name(client)} holds another run named {keys.name!r}: its uid is {uid}, "
            f"the folder's is {run_uid}"
        )
    malformed: Counter[str] = Counter()
    read = partial(_read, client, run_uid=run_uid, malformed=malformed)
    tickets = [(entry.number, entry.identity) for entry in read(keys.tickets("train"), "tickets")]
    groups = [(entry.id, entry.number, entry.identity) for entry in read(keys.groups("train"), "groups")]
    issued, issued_since = _read_counters(meta, read_meta(client, keys), malformed)
    return Streams(
        server=server_name(client),
        learner_is_live=bool(client.exists(keys.lease)),
        issued=issued,
        issued_since=issued_since,
        window=_window(meta.get(b"config", b"")),
        tickets=tuple(tickets),
        groups=tuple(groups),
        dead_letters=len(list(read(keys.dead, "dead"))),
        eval_tickets=sum(entry.is_sound for entry in read(keys.tickets("eval"), "eval_tickets")),
        eval_groups=sum(entry.is_sound for entry in read(keys.groups("eval"), "eval_groups")),
        malformed=malformed,
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    id: EntryId
    number: int  # the ticket's
    identity: str  # the ticket's
    is_sound: bool


def _read(client: redis.Redis, stream: str, what: str, *, run_uid: str, malformed: Counter[str]) -> Iterator[_Entry]:
    """Yield the entries about tickets of this run; also damaged ones, whose tickets exist all the same."""
    find_flaw = _group_flaw if what.endswith("groups") else _ticket_flaw
    for entry_id, fields in _entries(client, stream):
        number = flaw = _number(fields, run_uid)
        if isinstance(number, int):
            purpose = (
                fields.get(b"p", b"").decode(errors="replace")
                if what == "dead"
                else "eval"
                if what.startswith("eval")
                else "train"
            )
            identity = fields.get(b"d", b"").decode(errors="replace")
            flaw = find_flaw(fields, (number, identity, run_uid, purpose))
            if flaw != "not_delivered":
                yield _Entry(entry_id, number, identity, is_sound=not flaw)
        if flaw:
            malformed[f"{what}/{flaw}"] += 1


def _ticket_flaw(fields: Mapping[bytes, bytes], expected: tuple[int, str, str, str]) -> str:
    try:
        ticket = decode_ticket(fields.get(b"b", b""))
    except WireError:
        return "body"
    return "" if (ticket.number, ticket.identity, ticket.run_uid, ticket.purpose) == expected else "body"


def _group_flaw(fields: Mapping[bytes, bytes], expected: tuple[int, str, str, str]) -> str:
    if not fields.get(b"t"):
        return "not_delivered"  # not by the holder of a lease, so it answers no ticket
    part = "header"
    try:
        header = decode_header(fields.get(b"h", b""))
        if (header.ticket, header.identity, header.run_uid, header.purpose) != expected:
            return part
        part = "body"
        decode_body(header, fields.get(b"b", b""))
    except WireError:
        return part
    return ""


def _number(fields: Mapping[bytes, bytes], run_uid: str) -> int | str:
    """Return the ticket's number, or what is wrong with an entry that is about no ticket of this run."""
    if fields.get(b"u") != run_uid.encode():
        return "wrong_run"
    text = fields.get(b"n", b"")
    return int(text) if text.isdigit() and len(text) < 19 else "no_number"


def _entries(client: redis.Redis, stream: str) -> Iterator[RawEntry]:
    """Yield all entries of a stream, reading page by page."""
    first = "-"
    while True:
        page: Any = client.xrange(stream, min=first, count=_ENTRIES_A_PAGE)
        yield from ((parse_id(entry_id.decode()), fields) for entry_id, fields in page)
        if not page:
            return
        first = f"({page[-1][0].decode()}"


def _read_counters(
    before: Mapping[bytes, bytes], after: Mapping[bytes, bytes], malformed: Counter[str]
) -> tuple[int | None, int]:
    """Return (tickets issued, issued meanwhile). A learner that started meanwhile may count from lower."""
    if b"issued" not in before or b"issued" not in after:
        return None, 0
    texts = (before[b"issued"], after[b"issued"])
    if not all(text.isdigit() and len(text) < 19 for text in texts):
        malformed["meta/issued"] += 1
        return None, 0
    first, last = map(int, texts)
    return min(first, last), max(0, last - first)


def _window(config: bytes) -> int:
    try:
        fields = json.loads(config)
        return int((fields["lag"]["max_steps"] + 1) * fields["training"]["groups_per_step"])
    except (ValueError, KeyError, TypeError):
        return _MAX_WINDOW
