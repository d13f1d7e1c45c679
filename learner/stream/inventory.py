"""What Redis holds of the training tickets and groups, as against the ledger: what is too much, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.stream.ledger import Ledger
from streamrl.transport.seam import GroupStream
from streamrl.transport.types import START, PresentGroup, PresentTicket, entry_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    tickets: Sequence[PresentTicket]
    groups: Sequence[PresentGroup]  # all that no commit has trimmed
    retried: Mapping[int, int]  # which ticket repeats which dead one

    @staticmethod
    def take(stream: GroupStream) -> Inventory:
        # Tickets first: delivering turns a ticket into a group, so one that moves in between is seen at least once.
        tickets = stream.present_tickets("train")
        return Inventory(tickets=tickets, groups=stream.present_groups("train", after=START), retried=stream.retried())

    def answered(self, *, cursor: str, unread: Sequence[str]) -> set[int]:
        """Tickets whose groups are there and will be read."""
        last, again = entry_order(cursor), set(unread)
        return {g.number for g in self.groups if entry_order(g.entry_id) > last or g.entry_id in again} - {-1}

    def asked(self) -> set[int]:
        """Tickets that workers can take up, or have."""
        return {ticket.number for ticket in self.tickets if ticket.sound}

    def unreadable(self) -> dict[int, str]:
        """Tickets whose entries no worker can read, and why. They would go round from lease to lease for ever."""
        asked = self.asked() | {-1}
        return {t.number: t.flaw for t in self.tickets if t.flaw is not None and t.number not in asked}

    def superfluous(self, ledger: Ledger) -> list[str]:
        """Entries among the tickets that nobody should take up: unreadable, of tickets that have ended, or a second
        one of the same ticket."""
        found: list[str] = []
        seen: set[int] = set()
        for ticket in self.tickets:
            if not ticket.sound or ticket.number in seen or not ledger.is_open(ticket.number):
                found.append(ticket.entry_id)
            else:
                seen.add(ticket.number)
        return found
