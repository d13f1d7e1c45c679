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


class Reconciler:
    def __init__(
        self, *, stream: GroupStream, ledger: Ledger, hand: Hand, backlog: Backlog, dispatch: Dispatch
    ) -> None:
        self._stream, self._ledger, self._hand = stream, ledger, hand
        self._backlog, self._dispatch = backlog, dispatch
        self._counter_is_sure = False  # until Redis was asked for tickets issued after the checkpoint

    def reconcile(self, *, cursor: str, step: int) -> None:
        """Groups up to the cursor have been read."""
        self._stream.restore(cursor=cursor, retried=self._ledger.retries.known())
        self._hand.put_back()  # read again: bodies may be gone, and the ranks have yet to fetch them
        found = Inventory.take(self._stream)
        self._backlog.recount(found.groups, cursor=cursor)
        present = found.asked() | found.answered(cursor=cursor, unread=self._hand.unread)
        if not self._counter_is_sure:
            self._dispatch.count_issued(present, found.retried, step=step)
            self._counter_is_sure = True
        superfluous = found.superfluous(self._ledger)
        missing = [number for number in self._ledger.open_tickets() if number not in present]
        flaws = found.unreadable()
        unreadable = flaws.keys() & set(missing)
        if superfluous:
            self._stream.delete_tickets("train", superfluous)
            crashpoint("reconcile.deleted")
        self._dispatch.issue((number for number in missing if number not in unreadable), step=step)
        for number in sorted(unreadable):
            self._dispatch.failed(number, error=f"no worker could read the ticket: {flaws[number]}", step=step)
        self._stream.count_issued(self._ledger.issued)
        log.info(
            "reconciled",
            present=len(present),
            deleted=len(superfluous),
            issued_again=len(missing),
            unreadable=len(unreadable),
        )
