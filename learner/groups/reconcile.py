"""Putting right what Redis has lost, or holds too much of: at the start, after every trouble with it, and now and then.

    streams made whole ─► inventory: tickets, then groups ─► superfluous tickets deleted ─► missing ones issued again
                                                                                            ─► the audit told the count

Whatever was read and not resolved is to be read again, for the bodies may be gone. Blocks on Redis within its bounds.

What Redis holds of the training tickets and groups, as against the ledger: what is too much, what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.dispatch import Backlog, Dispatch
from streamrl.learner.groups.ledger import Ledger
from streamrl.learner.groups.plan import ReadyGroups
from streamrl.protocol.transport.types import START, GroupStream, PresentGroup, PresentTicket, entry_order

log = structlog.get_logger(__name__)


def reconcile(
    *,
    stream: GroupStream,
    ledger: Ledger,
    ready_groups: ReadyGroups,
    backlog: Backlog,
    dispatch: Dispatch,
    cursor: str,
    step: int,
) -> None:
    """Groups up to the cursor have been read."""
    stream.restore(cursor=cursor, retried=ledger.retries.known())
    ready_groups.put_back()  # read again: bodies may be gone, and the ranks have yet to fetch them
    found = Inventory.take(stream)
    backlog.recount(found.groups, cursor=cursor)
    present = found.asked() | found.answered(cursor=cursor, unread=ready_groups.unread)
    dispatch.count_issued(present, found.retried, step=step)
    superfluous = found.superfluous(ledger)
    missing = [number for number in ledger.open_tickets() if number not in present]
    flaws = found.unreadable()
    unreadable = flaws.keys() & set(missing)
    if superfluous:
        stream.delete_tickets("train", superfluous)
        crashpoint("reconcile.deleted")
    dispatch.issue((number for number in missing if number not in unreadable), step=step)
    for number in sorted(unreadable):
        dispatch.failed(number, error=f"no worker could read the ticket: {flaws[number]}", step=step)
    stream.count_issued(ledger.issued)
    log.info(
        "reconciled",
        present=len(present),
        deleted=len(superfluous),
        issued_again=len(missing),
        unreadable=len(unreadable),
    )


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
