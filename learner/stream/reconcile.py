"""Putting right what Redis has lost, or holds too much of: at the start, after every trouble with it, and now and then.

    streams made whole ─► inventory: tickets, then groups ─► superfluous tickets deleted ─► missing ones issued again
                                                                                            ─► the audit told the count

Whatever was read and not resolved is to be read again, for the bodies may be gone. Blocks on Redis within its bounds.
"""

from __future__ import annotations

import structlog

from learner.stream.backlog import Backlog
from learner.stream.dispatch import Dispatch
from learner.stream.hand import Hand
from learner.stream.inventory import Inventory
from learner.stream.ledger import Ledger
from streamrl.crashpoints import crashpoint
from streamrl.transport.seam import GroupStream

log = structlog.get_logger(__name__)


def reconcile(
    *, stream: GroupStream, ledger: Ledger, hand: Hand, backlog: Backlog, dispatch: Dispatch, cursor: str, step: int
) -> None:
    """Groups up to the cursor have been read."""
    stream.restore(cursor=cursor, retried=ledger.retries.known())
    hand.put_back()  # read again: bodies may be gone, and the ranks have yet to fetch them
    found = Inventory.take(stream)
    backlog.recount(found.groups, cursor=cursor)
    present = found.asked() | found.answered(cursor=cursor, unread=hand.unread)
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
