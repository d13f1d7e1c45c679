"""Repairs what Redis has lost or holds in excess: at the start, after every Redis failure, and now and then.

    streams restored ─► inventory: tickets, then groups ─► superfluous tickets deleted ─► missing ones issued again
                                                           ─► dead letters likewise    ─► issued count to the audit

An entry with one of our ticket numbers counts only if it asks for what that number stands for: a Redis that lost and
regained its latest writes may hold another learner's tickets under the same numbers (`wire.ticket`).

The ledger, and with it the checkpoint, is the authority on dead letters. A ticket is dead before its letter is in
Redis; letters that Redis lost or kept too long are repaired here. Lost letters never stop a run: those that a full
server refuses are offered again at the next reconciling. Blocks on Redis, within its limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import structlog
from msgspec.structs import replace

from streamrl.config import schema
from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.backlog import Inventory
from streamrl.learner.groups.curriculum import PromptOrder
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.intake import NOT_ASKED
from streamrl.learner.groups.numbering import Retries
from streamrl.learner.groups.plan import Books
from streamrl.learner.groups.tickets import Tickets
from streamrl.protocol.transport.types import GroupStream

log = structlog.get_logger(__name__)


class Reconciler:
    def __init__(
        self,
        *,
        stream: GroupStream,
        order: PromptOrder,
        books: Books,
        tickets: Tickets,
        dispatch: Dispatch,
        config: schema.Config,
    ) -> None:
        self._stream, self._order, self._tickets, self._dispatch = stream, order, tickets, dispatch
        self._ledger, self._lag = books.ledger, books.lag
        self._ready_groups, self._backlog = books.ready_groups, books.backlog
        self._max_attempts = config.worker.max_attempts
        self._widest_window = (config.lag.max_steps + 1) * config.training.groups_per_step
        self._is_issued_known = False  # the issued count includes tickets issued after the checkpoint

    def reconcile(self, *, cursor: str, step: int) -> Inventory:
        """Compare Redis with the ledger and repair the differences.

        Groups up to the cursor have been read. Unresolved ones are read again, since their bodies may be gone and the
        ranks still have to fetch them.
        """
        ledger = self._ledger
        self._stream.restore(cursor=cursor, retried=self._retried())
        self._ready_groups.put_back()
        found = Inventory.take(self._stream)
        self._backlog.recount(found.groups, cursor=cursor)
        live_identities = found.live_identities(cursor=cursor, unread=self._ready_groups.unread)
        self._count_issued(live_identities, found.retried, step=step)
        present = {n for n, identity in live_identities if ledger.is_open(n) and ledger.confirm_identity(n, identity)}
        superfluous = found.superfluous(ledger)
        missing = [number for number in ledger.open_tickets() if number not in present]
        flaws = found.unreadable(ledger)
        unreadable = flaws.keys() & set(missing)
        for ticket in (of_another_lineage := found.of_another_lineage(ledger)):
            ledger.ignore(NOT_ASKED)
            log.warning("ticket of another lineage", entry=ticket.entry_id, ticket=ticket.number)
        if superfluous:
            self._stream.delete_tickets("train", superfluous)
            crashpoint("reconcile.deleted")
        self._dispatch.issue((number for number in missing if number not in unreadable), step=step)
        self._repair_letters(found, step=step)
        for number in sorted(unreadable):
            self._dispatch.failed(number, error=f"no worker could read the ticket: {flaws[number]}", step=step)
        self._stream.count_issued(ledger.issued)
        log.info(
            "reconciled",
            present=len(present),
            deleted=len(superfluous),
            of_another_lineage=len(of_another_lineage),
            issued_again=len(missing),
            unreadable=len(unreadable),
        )
        return found

    def _retried(self) -> dict[int, int | None]:
        """The retries that Redis should know: ours, and removals (None) of another lineage's below our issued count."""
        known = self._ledger.retries.known()
        others = {n: None for n in self._stream.retried() if n < self._ledger.issued and n not in known}
        return {**others, **known}

    def _count_issued(self, live_identities: Set[tuple[int, str]], retried: Mapping[int, int], *, step: int) -> None:
        """Raise the issued count past tickets that an earlier learner issued after the checkpoint. Runs once.

        Such tickets are still in Redis, except for what Redis has lost, so nothing beyond a gap of more than a window
        counts: a forged high number must not make us issue all those below it, and reissuing genuine tickets beyond a
        gap costs only their generation. A ticket whose content differs from what its number stands for, given these
        retries, does not count either: nothing after the checkpoint has ended, so these numbers may be reused.
        """
        if self._is_issued_known:
            return
        counter = first = self._ledger.issued
        repeated = {number: dead for number, dead in retried.items() if number >= first}
        retries = Retries({**self._ledger.retries.known(), **repeated})
        for number in sorted(number for number in {*(n for n, _ in live_identities), *repeated} if number >= first):
            too_far = number - counter > self._widest_window or retries.num_places(number + 1) > self._order.num_drawn
            if too_far or not self._order.knows(retries.place(number)):
                break
            if number in repeated or (number, self._tickets.identity(number, retries)) in live_identities:
                counter = number + 1
        self._ledger.issued = counter
        for number in range(first, counter):
            if number in repeated:
                self._ledger.repeat(repeated[number], by=number)
            identity = self._tickets.identity(number, self._ledger.retries)
            self._ledger.begin(number, step=step, identity=identity)  # with weights at least as new as the checkpoint's
        self._is_issued_known = True

    def _repair_letters(self, found: Inventory, *, step: int) -> None:
        ledger = self._ledger
        ledger.adopt_letters(letter.number for letter in found.letters)
        for number in found.purged:
            ledger.letters.pop(number, None)
        listed = found.listed(ledger)
        stale = sorted({letter.entry_id for letter in found.letters} - set(listed.values()))
        # A request stands while its ticket may still die: it had died in the lost steps that the request refers to.
        settled = [
            number
            for number in self._dispatch.retry_requests
            if number not in ledger.letters and not ledger.is_open(number)
        ]
        if stale or settled:
            self._stream.letters.remove(stale, requests=settled)
        missing = [(number, letter) for number, letter in ledger.letters.items() if number not in listed]
        version, _ = self._lag.first_version()
        again = (
            (replace(ticket, attempt=self._max_attempts), letter)
            for number, letter in missing
            for ticket in self._tickets.make([number], step=step, min_version=version)
        )
        if not self._stream.letters.put(again, wait_for_room=False):
            log.warning("Redis is full: lost dead letters not restored", letters=len(missing))
        if stale or missing:
            log.info("dead letters repaired", letters=len(ledger.letters), removed=len(stale), put_back=len(missing))
