"""The learner's half of the stream in memory: what tests and dry runs use instead of Redis.

`MemoryServer` outlives its users as Redis does, so that a learner can "crash" and another go on; `LearnerStreamDouble`
is one learner's connection. The worker's side is the server's own `deliver` and `append`. A `fault` may raise at any
write, before or after it took effect: a lost command, or a lost reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamrl.errors import Fenced
from streamrl.transport.types import START, Control, Entry
from streamrl.wire.ticket import Purpose, Ticket


def _key(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence)


@dataclass(slots=True, kw_only=True)
class MemoryServer:
    """Streams, and what else of Redis the learner's feed touches."""

    tickets: dict[Purpose, dict[str, Ticket]] = field(default_factory=lambda: {"train": {}, "eval": {}})
    groups: dict[Purpose, dict[str, Entry]] = field(default_factory=lambda: {"train": {}, "eval": {}})
    dead: list[tuple[Ticket, str]] = field(default_factory=list)
    epoch: int = 0
    control: Control = "run"
    disturbed: bool = False
    last_id: int = 0
    # Called when a read finds nothing, with the seconds it may wait: the place to move a fake clock on.
    wait: Callable[[float], None] = lambda seconds: None
    # Called with "issue:before", "issue:after" and so on; what it raises reaches the learner.
    fault: Callable[[str], None] = lambda point: None

    def next_id(self) -> str:
        self.last_id += 1
        return f"{self.last_id}-0"

    def deliver(self, purpose: Purpose, ticket_id: str, header: bytes, body: bytes) -> bool:
        """As the worker's script: the ticket becomes a group in one step, or somebody was faster."""
        ticket = self.tickets[purpose].pop(ticket_id, None)
        if ticket is None:
            return False
        self.append(purpose, number=ticket.number, run_uid=ticket.run_uid, header=header, body=body)
        return True

    def append(self, purpose: Purpose, *, number: int, run_uid: str, header: bytes, body: bytes) -> str:
        """An entry among the groups, asked for or not."""
        entry_id = self.next_id()
        self.groups[purpose][entry_id] = Entry(id=entry_id, number=number, run_uid=run_uid, header=header, body=body)
        return entry_id

    def flush(self) -> None:
        """Everything is gone, as after FLUSHALL."""
        for streams in (self.tickets, self.groups):
            for purpose in streams:
                streams[purpose].clear()
        self.disturbed = True


class LearnerStreamDouble:
    def __init__(self, server: MemoryServer, *, epoch: int = 1) -> None:
        self._server = server
        self._epoch = epoch
        server.epoch = max(server.epoch, epoch)

    @property
    def disturbed(self) -> bool:
        return self._server.disturbed

    def restore(self, *, cursor: str) -> None:
        def effect() -> None:
            self._server.last_id = max(self._server.last_id, _key(cursor)[0])
            self._server.disturbed = False

        self._write("restore", effect)

    def control(self) -> Control:
        return self._server.control

    def issue(self, tickets: Sequence[Ticket]) -> None:
        def effect() -> None:
            for ticket in tickets:
                self._server.tickets[ticket.purpose][self._server.next_id()] = ticket

        self._write("issue", effect)

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        found = self._after(purpose, after)[:count]
        if not found and block_ms:
            self._server.wait(block_ms / 1000)
            found = self._after(purpose, after)[:count]
        return found

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]:
        return [self._server.groups[purpose].get(entry_id) for entry_id in ids]

    def present_tickets(self, purpose: Purpose) -> dict[int, str]:
        return {ticket.number: entry_id for entry_id, ticket in self._server.tickets[purpose].items()}

    def present_groups(self, purpose: Purpose, *, after: str) -> list[tuple[str, int]]:
        return [(entry.id, entry.number) for entry in self._after(purpose, after)]

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None:
        def effect() -> None:
            for entry_id in entry_ids:
                self._server.tickets[purpose].pop(entry_id, None)

        self._write("delete_tickets", effect)

    def dead(self, ticket: Ticket, *, error: str) -> None:
        self._write("dead", lambda: self._server.dead.append((ticket, error)))

    def trim_eval(self, *, below: str) -> None:
        self._write("trim_eval", lambda: self._trim("eval", below))

    def commit(self, *, step: int, cursor: str, trim_below: str) -> None:
        self._write("commit", lambda: self._trim("train", trim_below))

    def _trim(self, purpose: Purpose, below: str) -> None:
        groups = self._server.groups[purpose]
        self._server.groups[purpose] = {i: entry for i, entry in groups.items() if _key(i) >= _key(below)}

    def _after(self, purpose: Purpose, after: str) -> list[Entry]:
        entries = self._server.groups[purpose].values()
        return [entry for entry in entries if _key(entry.id) > _key(after or START)]

    def _write(self, name: str, effect: Callable[[], object]) -> None:
        if self._server.epoch > self._epoch:
            raise Fenced(f"epoch {self._epoch} was replaced by epoch {self._server.epoch}")
        self._server.fault(f"{name}:before")
        effect()
        self._server.fault(f"{name}:after")
