"""The transport's data types, and the seam between the stream and the learner's feed: tickets and groups, as rank 0
sees them.

`transport.learner.LearnerStream` implements it on Redis, `transport.double.LearnerStreamDouble` in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from streamrl.protocol.wire.ticket import Purpose, Ticket

RunState = Literal["running", "finished", "stopped", "failed"]
RUN_STATES: tuple[RunState, ...] = ("running", "finished", "stopped", "failed")
Control = Literal["run", "pause", "drain", "stop"]
CONTROLS: tuple[Control, ...] = ("run", "pause", "drain", "stop")
START = "0-0"  # the cursor before the first entry of a stream


def entry_order(entry_id: str) -> tuple[int, int]:
    """Sort key of entry ids: (milliseconds, sequence)."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The operator's requests."""

    control: Control = "run"
    retries: tuple[int, ...] = ()  # dead tickets to retry; issuing a ticket with `retry_of` fulfills one


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    uid: str
    name: str
    term: int
    config_json: str
    fingerprint: str
    state: RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A delivered group as stored in the stream. Untrusted: anyone with permission to deliver wrote it."""

    id: str
    number: int  # ticket number; -1 when the entry has none
    run_uid: str
    header: bytes
    body: bytes
    identity: str = ""  # of the ticket
    ticket_entry: str = ""  # id of the ticket's entry, which it replaced; empty: not delivered by the holder of a lease


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentTicket:
    """An entry of the ticket stream, leased or not."""

    entry_id: str
    number: int  # -1: not a ticket of this run
    identity: str
    flaw: str | None  # why no worker can use it: it is unreadable, or contradicts its entry's fields

    @property
    def sound(self) -> bool:
        return self.flaw is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGroup:
    """An entry of the group stream, or of the dead letters."""

    entry_id: str
    number: int  # of the ticket; -1: not of this run, or not delivered by the holder of a lease
    identity: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A ticket this worker holds until it delivers it, hands it back, or stops renewing it."""

    entry_id: str
    ticket: Ticket
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    version: int
    base: int  # the version that a delta builds on; 0: an anchor
    step: int  # optimizer step whose weights these are
    manifest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step's metrics."""

    id: str
    step: int
    term: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the journal."""

    id: str
    kind: str
    term: int
    at: float
    detail: Mapping[str, str | int | float]


class Letter(NamedTuple):
    """The record of a dead ticket."""

    error: str  # of its last attempt
    at: float  # when it was given up (unix time)
    identity: str = ""  # of the ticket, from the ledger; empty: an older version did not record it


class Letters(Protocol):
    """The dead letters: tickets that were given up, for operators to inspect and retry."""

    def put(self, letters: Iterable[tuple[Ticket, Letter]], *, wait_for_room: bool = True) -> bool:
        """Append one letter per ticket. False: the server has no room for all, and `wait_for_room` is false."""

    def present(self) -> Sequence[PresentGroup]:
        """List the letters, without their tickets."""

    def purged(self) -> Set[int]:
        """Return the tickets whose letters an operator purged."""

    def remove(self, entry_ids: Sequence[str], *, requests: Sequence[int] = ()) -> None:
        """Delete these letters, and the requests to retry these tickets."""


class GroupStream(Protocol):
    """Issues tickets and reads groups. Every method that writes raises Fenced once a newer learner has taken over."""

    @property
    def letters(self) -> Letters: ...

    @property
    def disturbed(self) -> bool:
        """Whether the server was down, replaced or emptied since the last `restore`: data may be missing."""

    def restore(self, *, cursor: str, retried: Mapping[int, int | None] | None = None) -> None:
        """Create missing streams, keep new groups beyond the cursor, and record which tickets retry which dead ones.

        None as a value: the ticket is no retry, whatever was recorded.
        """

    def orders(self) -> Orders:
        """Return the operator's requests."""

    def issue(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """Issue tickets; one with `retry_of` also ends the request for it and is recorded as a retry, in the same step.

        Returns the tickets for which the server has no room; they are not written.
        """

    def count_issued(self, issued: int) -> None:
        """Set the number of the next training ticket, for the audit; `issue` advances it."""

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        """Return groups after this id in stream order; waits at most `block_ms` for the first one, 0: not at all."""

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]: ...

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        """Record the checkpoint of this step: delete training groups before `trim_below`, and the `ended` ones after
        it.
        """

    def waiting(self, purpose: Purpose) -> set[tuple[int, str]]:
        """Return number and identity of undelivered tickets, cheaper than `present_tickets`."""

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        """List the undelivered tickets in stream order."""

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        """List the groups after this id."""

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None: ...

    def retried(self) -> Mapping[int, int]:
        """Map the number of each retry ticket to the dead ticket's, as far as the server knows."""

    def trim_eval(self, *, below: str) -> None:
        """Delete evaluation groups with smaller ids."""
