"""The learner's half of the stream in memory: tests and dry runs use it instead of Redis.

`MemoryServer` outlives its users as Redis does, so that one learner can "crash" and another resume.
`LearnerStreamDouble` is one learner's connection. The worker's side is the server's own `deliver` and `append`. A
`fault` may raise at any write, before or after it took effect: a lost command, or a lost reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import Fenced
from streamrl.protocol.transport.types import (
    START,
    Control,
    Entry,
    Letter,
    Orders,
    PresentGroup,
    PresentTicket,
    entry_order,
)
from streamrl.protocol.wire.ticket import Purpose, Ticket


@dataclass(slots=True, kw_only=True)
class MemoryServer:
    """The streams, and everything else in Redis that the learner's feed uses."""

    tickets: dict[Purpose, dict[str, Ticket]] = field(default_factory=lambda: {"train": {}, "eval": {}})
    groups: dict[Purpose, dict[str, Entry]] = field(default_factory=lambda: {"train": {}, "eval": {}})
    rotten: set[str] = field(default_factory=set)  # ids of unreadable tickets
    dead: list[tuple[Ticket, str]] = field(default_factory=list)  # the dead letters
    purged: set[int] = field(default_factory=set)  # numbers of tickets whose letters were purged
    retry_requests: set[int] = field(default_factory=set)
    retried: dict[int, int] = field(default_factory=dict)
    term: int = 0
    control: Control = "run"
    disturbed: bool = False
    full: bool = False  # accepts no more tickets
    last_id: int = 0
    # Called when a read finds nothing, with the seconds it may wait: advance a fake clock here.
    wait: Callable[[float], None] = lambda seconds: None
    # Called with "issue:before", "issue:after" and so on; its exceptions reach the learner.
    fault: Callable[[str], None] = lambda point: None

    def next_id(self) -> str:
        self.last_id += 1
        return f"{self.last_id}-0"

    def deliver(self, purpose: Purpose, ticket_id: str, header: bytes, body: bytes) -> bool:
        """Replace the ticket by its group in one step, as the worker's script does; False if another delivered it
        first.
        """
        ticket = self.tickets[purpose].pop(ticket_id, None)
        if ticket is None:
            return False
        self.append(
            purpose, number=ticket.number, run_uid=ticket.run_uid, identity=ticket.identity, ticket_entry=ticket_id,
            header=header, body=body,
        )  # fmt: skip
        return True

    def append(self, purpose: Purpose, **fields: Any) -> str:
        """Append an entry with these fields to the groups, whether or not a ticket asks for it."""
        entry_id = self.next_id()
        self.groups[purpose][entry_id] = Entry(id=entry_id, **fields)
        return entry_id

    def ask_for_retry(self, number: int) -> None:
        """Request a retry, as the operator's script does: only for a ticket that has a dead letter."""
        if any(ticket.number == number for ticket, _ in self.dead):
            self.retry_requests.add(number)

    def flush(self) -> None:
        """Delete everything, as FLUSHALL does."""
        for streams in (self.tickets, self.groups):
            for purpose in streams:
                streams[purpose].clear()
        for gone in (self.rotten, self.dead, self.purged, self.retry_requests, self.retried):
            gone.clear()
        self.disturbed = True


class LearnerStreamDouble:
    def __init__(self, server: MemoryServer, *, term: int = 1) -> None:
        self._server = server
        self._term = term
        server.term = max(server.term, term)
        self.letters = LettersDouble(server, self.writing)

    @property
    def disturbed(self) -> bool:
        return self._server.disturbed

    def restore(self, *, cursor: str, retried: Mapping[int, int | None] | None = None) -> None:
        self._server.disturbed = False  # as with Redis: later disturbances set it again
        with self.writing("restore"):
            self._server.last_id = max(self._server.last_id, entry_order(cursor)[0])
            for number, dead in (retried or {}).items():
                self._server.retried.pop(number, None)
                if dead is not None:
                    self._server.retried[number] = dead

    def orders(self) -> Orders:
        return Orders(control=self._server.control, retries=tuple(sorted(self._server.retry_requests)))

    def issue(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        refused = tickets if self._server.full else []
        with self.writing("issue"):
            for ticket in tickets[len(refused) :]:
                self._server.tickets[ticket.purpose][self._server.next_id()] = ticket
                if ticket.purpose == "train":
                    self._note_retry(ticket.number, ticket.retry_of)
        return refused

    def count_issued(self, issued: int) -> None:
        with self.writing("count_issued"):
            pass  # the audit does not read memory

    def _note_retry(self, number: int, repeats: int | None) -> None:
        server = self._server
        server.retried.pop(number, None)
        if repeats is not None:
            server.retried[number] = repeats
            if repeats in server.retry_requests:
                server.retry_requests.remove(repeats)
                server.dead = [(ticket, error) for ticket, error in server.dead if ticket.number != repeats]

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        found = self._after(purpose, after)[:count]
        if not found and block_ms:
            self._server.wait(block_ms / 1000)
            found = self._after(purpose, after)[:count]
        return found

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]:
        return [self._server.groups[purpose].get(entry_id) for entry_id in ids]

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        return [
            PresentTicket(
                entry_id=entry_id,
                number=ticket.number,
                identity=ticket.identity,
                flaw="rotten" if entry_id in self._server.rotten else None,
            )
            for entry_id, ticket in self._server.tickets[purpose].items()
        ]

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        return [
            PresentGroup(
                entry_id=e.id,
                number=e.number if e.ticket_entry else -1,
                identity=e.identity,
                num_bytes=len(e.header) + len(e.body),
            )
            for e in self._after(purpose, after)
        ]

    def waiting(self, purpose: Purpose) -> set[tuple[int, str]]:
        return {(ticket.number, ticket.identity) for ticket in self._server.tickets[purpose].values()}

    def retried(self) -> Mapping[int, int]:
        return dict(self._server.retried)

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None:
        with self.writing("delete_tickets"):
            for entry_id in entry_ids:
                self._server.tickets[purpose].pop(entry_id, None)

    def trim_eval(self, *, below: str) -> None:
        with self.writing("trim_eval"):
            self._trim("eval", below)

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        with self.writing("commit"):
            self._trim("train", trim_below)
            for entry_id in ended:
                self._server.groups["train"].pop(entry_id, None)

    def _trim(self, purpose: Purpose, below: str) -> None:
        groups = self._server.groups[purpose]
        self._server.groups[purpose] = {i: e for i, e in groups.items() if entry_order(i) >= entry_order(below)}

    def _after(self, purpose: Purpose, after: str) -> list[Entry]:
        entries = self._server.groups[purpose].values()
        return [entry for entry in entries if entry_order(entry.id) > entry_order(after or START)]

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        if self._server.term > self._term:
            raise Fenced(f"term {self._term} was replaced by term {self._server.term}")
        self._server.fault(f"{name}:before")
        yield
        self._server.fault(f"{name}:after")


class LettersDouble:
    """Dead letters; a letter's entry id is its position, counted from 1."""

    def __init__(self, server: MemoryServer, writing: Callable[[str], AbstractContextManager[None]]) -> None:
        self._server, self._writing = server, writing

    def put(self, letters: Iterable[tuple[Ticket, Letter]], *, wait_for_room: bool = True) -> bool:
        waiting = list(letters)
        if not waiting or (self._server.full and not wait_for_room):
            return not waiting
        with self._writing("dead"):
            self._server.dead += [(ticket, letter.error) for ticket, letter in waiting]
            self._server.purged -= {ticket.number for ticket, _ in waiting}
        return True

    def present(self) -> list[PresentGroup]:
        places = enumerate(self._server.dead, start=1)
        return [
            PresentGroup(entry_id=f"{place}-0", number=t.number, identity=t.identity, num_bytes=0)
            for place, (t, _) in places
        ]

    def purged(self) -> set[int]:
        return set(self._server.purged)

    def remove(self, entry_ids: Sequence[str], *, requests: Sequence[int] = ()) -> None:
        with self._writing("letters"):
            places = enumerate(self._server.dead, start=1)
            self._server.dead = [letter for place, letter in places if f"{place}-0" not in entry_ids]
            self._server.retry_requests -= set(requests)
