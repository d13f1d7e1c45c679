"""Encoding and decoding of Redis data, paged stream reads, and batched deliveries.

Any client with the permissions may have written the data, so all of it is checked: by `read_ticket` and
`decode_reports` here, and by a group's readers later (`wire.group`).

A stream is read in pages, one of them ahead: the server prepares it while the reader processes the one before.

    read ──► page ──► the reader processes it ─────► read ──► page ──► ...
                └ the next one is requested ──── it arrives ──┘

A page that was read ahead has what a read at that moment would have returned, and is used only if the reader continues
where it stopped. Reading changes nothing, so any call may be retried. Blocks at most `block_ms`, or until the reply
times out; errors propagate.

Deliveries that are ready at about the same time share a call.

    one call is in progress ───────────────────────────► outcomes
    deliveries meanwhile are queued ───────────────────────► sent together, in order
                                     └ as soon as they fill a call ─► sent at once, beside the first

A round trip costs a worker more than the group itself, and groups often finish in bursts. Each call uses a lane, and a
lane has at most one call in progress, including its retries. So the server need only remember the last call of each
lane of a worker. Blocks as long as the call does.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar, get_args

import redis

from streamrl.errors import WireError
from streamrl.protocol.transport.types import RUN_STATES, Entry, Leased, PresentTicket, RunInfo
from streamrl.protocol.wire.codec import fields_of, pack, unpack
from streamrl.protocol.wire.ticket import IDENTITY_CHARS, Purpose, Ticket, decode_ticket
from streamrl.telemetry.progress import Report, Role, State

Word = TypeVar("Word", bound=str)

LARGEST = 1e200  # limit for values: the sum of larger ones may be infinite
_MAX_REPORT_BYTES = 64 << 10
_ID_CHARS = 41  # longest entry id
_NUM_LANES = 2  # one call is written while the server processes the other
# Per call. Larger calls gain nothing, and keep other clients of the server waiting.
_MOST_GROUPS = 64
_MOST_BYTES = 1 << 20


def read_ticket(body: bytes, *, purpose: Purpose, number: bytes, uid: bytes, identity: bytes) -> Ticket:
    """Decode the ticket; WireError unless it matches its entry's fields, which the delivery script compares."""
    ticket = decode_ticket(body)
    in_ticket = (ticket.purpose, str(ticket.number).encode(), ticket.run_uid.encode(), ticket.identity.encode())
    if in_ticket != (purpose, number, uid, identity):
        raise WireError("the ticket and its stream entry differ in number, purpose, run or request")
    return ticket


def to_number(text: bytes) -> int:
    """Parse a ticket number from an entry; -1 if it is none."""
    return int(text) if text.isdigit() and len(text) < 19 else -1


def one_of(choices: tuple[Word, ...], word: bytes | None, otherwise: Word) -> Word:
    """Return the choice stored in Redis; the default for a missing or unknown value (of another program version)."""
    return next((choice for choice in choices if choice.encode() == word), otherwise)


def to_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    return Entry(
        id=entry_id.decode(),
        number=to_number(fields.get(b"n", b"")),
        run_uid=fields.get(b"u", b"").decode(errors="replace")[:64],
        header=fields.get(b"h", b""),
        body=fields.get(b"b", b""),
        identity=_identity(fields),
        ticket_entry=fields.get(b"t", b"").decode(errors="replace")[:_ID_CHARS],
    )


def to_present(purpose: Purpose, run_uid: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> PresentTicket:
    number, uid = fields.get(b"n", b""), fields.get(b"u", b"")
    ours = uid == run_uid.encode()
    try:
        read_ticket(fields.get(b"b", b""), purpose=purpose, number=number, uid=uid, identity=fields.get(b"d", b""))
    except WireError as error:
        flaw: str | None = str(error)
    else:
        flaw = None if ours else "of another run"
    return PresentTicket(
        entry_id=entry_id.decode(), number=to_number(number) if ours else -1, identity=_identity(fields), flaw=flaw
    )


def _identity(fields: Mapping[bytes, bytes]) -> str:
    return fields.get(b"d", b"").decode(errors="replace")[:IDENTITY_CHARS]


def to_run_info(name: str, meta: Mapping[bytes, bytes]) -> RunInfo | None:
    """Decode `meta`; None if there is no run.

    Missing or unreadable values become empty, which no working run has: configuration and fingerprint are compared
    before anything uses them.
    """
    if b"uid" not in meta:
        return None

    def text(name: bytes) -> str:
        return meta.get(name, b"").decode(errors="replace")

    return RunInfo(
        uid=text(b"uid"),
        name=name,
        term=max(0, to_number(meta.get(b"term", b""))),
        config_json=text(b"config"),
        fingerprint=text(b"fingerprint"),
        state=one_of(RUN_STATES, meta.get(b"state"), "failed"),
    )


def encode_report(report: Report) -> bytes:
    return pack({**fields_of(report), "detail": json.dumps(dict(report.detail))})


def decode_report(data: bytes) -> Report:
    """Decode a report, or raise WireError."""
    with unpack(data, max_bytes=_MAX_REPORT_BYTES) as f:
        return Report(
            part=f.text("part", max_chars=200),
            role=f.one_of("role", get_args(Role)),
            host=f.text("host", max_chars=300),
            pid=f.integer("pid", low=0),
            state=f.one_of("state", get_args(State)),
            doing=f.text("doing", max_chars=200),
            since=f.number("since"),
            last_progress=f.number("last_progress"),
            at=f.number("at"),
            detail=_flat(f.json_object("detail")),
        )


def _flat(detail: Mapping[str, Any]) -> dict[str, int | float | str]:
    if any(not isinstance(value, int | float | str) for value in detail.values()):
        raise WireError("field 'detail' must be a flat JSON object")
    return {name: value for name, value in detail.items() if isinstance(value, str) or abs(value) < LARGEST}


def decode_reports(packed: Mapping[Any, Any]) -> list[Report]:
    reports: list[Report] = []
    for data in packed.values():
        with suppress(WireError):  # from another program, or an attack: it must not hide other reports
            reports.append(decode_report(data))
    return sorted(reports, key=attrgetter("part"))


class PagedReader:
    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        # Not from the pool: a reader abandoned within a page would not return it.
        pool = client.connection_pool
        self._connection = pool.connection_class(**pool.connection_kwargs)
        weakref.finalize(self, self._connection.disconnect)  # avoids a warning about an open socket
        self._reached = ""  # id of the last entry returned
        self._page: list[Any] = []  # entries after it that have arrived
        self._is_requested = False  # whether the page after those is requested

    def read(self, *, after: str, count: int, block_ms: int | None) -> list[Any]:
        """Return up to `count` entries after this id, as the client returns them."""
        if after != self._reached:
            self.forget()
        if self._is_requested:
            self._page = self._collect()
        if not self._page:
            self._request(after, count, *(() if block_ms is None else ("BLOCK", block_ms)))
            self._page = self._collect()
        handed_out, self._page = self._page[:count], self._page[count:]
        if handed_out:
            self._reached = handed_out[-1][0].decode()
        if len(handed_out) == count and not self._page:  # otherwise there is nothing to read ahead
            self._request(self._reached, count)
        return handed_out

    def forget(self) -> None:
        """Drop what was read ahead: it may be outdated, or from another server."""
        self._reached, self._page, self._is_requested = "", [], False
        self._connection.disconnect()

    def _request(self, after: str, count: int, *block: str | int) -> None:
        self._connection.connect()  # a sentinel connection finds the master only in this call
        self._connection.send_command("XREAD", "COUNT", count, *block, "STREAMS", self._stream, after)
        self._is_requested = True

    def _collect(self) -> list[Any]:
        self._is_requested = False
        reply: Any = self._client.parse_response(self._connection, "XREAD")  # type: ignore[no-untyped-call]
        return list(reply[0][1]) if reply else []


@dataclass(frozen=True, slots=True)
class Delivery:
    leased: Leased
    header: bytes
    body: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.body)


Deliver = Callable[[int, Sequence[Delivery]], Awaitable[Sequence[bool]]]  # whether each replaced its ticket


class Deliveries:
    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._waiting: deque[tuple[Delivery, asyncio.Future[bool]]] = deque()
        self._num_bytes = 0  # of the waiting deliveries
        self._lanes: dict[int, asyncio.Task[None]] = {}  # lanes with a call in progress

    async def add(self, delivery: Delivery) -> bool:
        """Queue a delivery and return its outcome, or raise its call's error. A cancelled caller may have delivered all
        the same.
        """
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((delivery, outcome))
        self._num_bytes += delivery.num_bytes
        if not self._lanes or (self._enough_for_a_call and len(self._lanes) < _NUM_LANES):
            lane = next(lane for lane in range(_NUM_LANES) if lane not in self._lanes)
            # It starts in the event loop's next iteration, so everything ready in this one goes along.
            self._lanes[lane] = asyncio.create_task(self._drain(lane), name=f"deliver groups {lane}")
        return await outcome

    @property
    def _enough_for_a_call(self) -> bool:
        return len(self._waiting) >= _MOST_GROUPS or self._num_bytes >= _MOST_BYTES

    async def _drain(self, lane: int) -> None:
        """Send one call after another while deliveries wait."""
        try:
            while self._waiting:
                await self._send(lane, self._take())
        finally:
            del self._lanes[lane]

    def _take(self) -> list[tuple[Delivery, asyncio.Future[bool]]]:
        taken: list[tuple[Delivery, asyncio.Future[bool]]] = []
        num_bytes = 0
        while self._waiting and len(taken) < _MOST_GROUPS and num_bytes < _MOST_BYTES:
            taken.append(self._waiting.popleft())
            num_bytes += taken[-1][0].num_bytes
        self._num_bytes -= num_bytes
        return taken

    async def _send(self, lane: int, batch: Sequence[tuple[Delivery, asyncio.Future[bool]]]) -> None:
        try:
            outcomes = await self._deliver(lane, [delivery for delivery, _ in batch])
        except BaseException as error:  # of any kind: the callers would otherwise wait for ever
            for _, waiter in batch:
                if not waiter.done():  # skip cancelled callers
                    waiter.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, waiter), outcome in zip(batch, outcomes, strict=True):
                if not waiter.done():
                    waiter.set_result(outcome)
