"""What the transport hands out, and the seam between the stream and the learner's feed: tickets and groups, as rank 0
sees them.

`transport.learner.LearnerStream` is it on Redis, `transport.double.LearnerStreamDouble` in memory.
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
    """Entry ids compare by this: milliseconds, sequence."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the operator wants."""

    control: Control = "run"
    retries: tuple[int, ...] = ()  # dead tickets that are to be repeated; issuing with `retry_of` answers one


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
    """A delivered group as it lies in the stream; whoever may deliver wrote it, so nothing in it is trusted yet."""

    id: str
    number: int  # ticket number; -1 when the entry has none
    run_uid: str
    header: bytes
    body: bytes
    identity: str = ""  # of the ticket
    ticket_entry: str = ""  # id of the ticket's entry, whose place it took; empty: no holder of a lease delivered it


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentTicket:
    """An entry among the tickets, leased or not."""

    entry_id: str
    number: int  # -1: of no ticket of this run
    identity: str
    flaw: str | None  # why no worker can take it up: it cannot be read, or does not say what its entry says

    @property
    def sound(self) -> bool:
        return self.flaw is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGroup:
    """An entry among the groups, or among the dead letters."""

    entry_id: str
    number: int  # of the ticket; -1: of none of this run, or delivered by no holder of a lease
    identity: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A ticket this worker holds, until it delivers it, hands it back, or stops renewing it."""

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
    """What is told of a dead ticket."""

    error: str  # of its last attempt
    at: float  # when it was given up (unix time)
    identity: str = ""  # of the ticket, as the ledger knows it; empty: an older version did not note it


class Letters(Protocol):
    """The dead letters: tickets that were given up, for people, and to be repeated."""

    def put(self, letters: Iterable[tuple[Ticket, Letter]], *, wait_for_room: bool = True) -> bool:
        """Put these at the end, a letter a ticket. False: the server has no room for all, and is not waited for."""

    def present(self) -> Sequence[PresentGroup]:
        """What lies there, without the tickets themselves."""

    def purged(self) -> Set[int]:
        """Tickets whose letters an operator threw away."""

    def remove(self, entry_ids: Sequence[str], *, requests: Sequence[int] = ()) -> None:
        """And requests to repeat these tickets."""


class GroupStream(Protocol):
    """Tickets out, groups in. Every method that writes raises Fenced once a newer learner has taken over."""

    @property
    def letters(self) -> Letters: ...

    @property
    def disturbed(self) -> bool:
        """The server was away, replaced or emptied since the last `restore`: something may be missing."""

    def restore(self, *, cursor: str, retried: Mapping[int, int | None] | None = None) -> None:
        """Make the streams exist, let no new group land at or behind the cursor, and note which tickets repeat which
        dead ones; None: none, whatever was noted."""

    def orders(self) -> Orders:
        """The operator's."""

    def issue(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """A ticket with `retry_of` also ends the request for it, and is noted among the retried: all in one step.
        Returns those for which the server has no room, so that they are not written."""

    def count_issued(self, issued: int) -> None:
        """The number of the next training ticket, for whoever audits: `issue` carries it on."""

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        """Groups after this id in the stream's order; waits for the first one at most so long, 0: not at all."""

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]: ...

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        """The checkpoint of this step is there: remove training groups with ids smaller than `trim_below`, and those
        that have ended among the others."""

    def waiting(self, purpose: Purpose) -> set[tuple[int, str]]:
        """Number and identity of what nobody has delivered: for those who need to know no more than that."""

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        """What nobody has delivered, in the stream's order."""

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        """The groups after this id."""

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None: ...

    def retried(self) -> Mapping[int, int]:
        """By the number of a ticket that repeats a dead one, the dead one's, as far as the server knows."""

    def trim_eval(self, *, below: str) -> None:
        """Remove evaluation groups with smaller ids."""
