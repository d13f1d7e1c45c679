"""Reads what workers delivered, in the stream's order, and decides what becomes of each group.

    groups ──► accept: whose, valid (`gate`), how old (`lag`), worth training? ──► in hand
                  └──► its ticket is dropped, a failure counted, or the group set aside

No content of a group can stop it. Blocks on Redis, at most as long as it may wait for groups.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.books import Books
from streamrl.learner.groups.counts import NOT_OURS, Datasets, Lengths
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.failures import FailuresInRow
from streamrl.learner.groups.gate import LATE_FAILURE, NOT_ASKED, NOT_LEASED, Gate
from streamrl.learner.groups.ledger import DROPPED, TRAINED
from streamrl.learner.groups.plan import ReadyGroup
from streamrl.learner.groups.quarantine import QUARANTINED, Quarantine
from streamrl.learner.groups.tickets import Tickets
from streamrl.learner.groups.waiting import WaitTimers
from streamrl.protocol.transport.types import Entry, GroupStream
from streamrl.protocol.wire.group import GroupHeader

_READ_BYTES = 1 << 20  # approximate size of a read: larger replies cost more memory and gain nothing

log = structlog.get_logger(__name__)


class Intake:
    def __init__(
        self,
        *,
        stream: GroupStream,
        cursor: str,
        gate: Gate,
        drop_reason: Callable[[GroupHeader], str | None],  # the algorithm's; it returns None for a group to train
        books: Books,
        tickets: Tickets,
        dispatch: Dispatch,
        failures: FailuresInRow,
        quarantine: Quarantine,
        lengths: Lengths,
        datasets: Datasets,
        wait_timers: WaitTimers,
    ) -> None:
        self._stream, self._gate, self._reason_of_algorithm = stream, gate, drop_reason
        self._ledger, self._lag = books.ledger, books.lag
        self._ready_groups, self._backlog = books.ready_groups, books.backlog
        self._tickets, self._dispatch = tickets, dispatch
        self._failures, self._quarantine = failures, quarantine
        self._lengths, self._datasets, self._wait_timers = lengths, datasets, wait_timers
        self.cursor = cursor  # id of the last entry read

    def receive(self, *, step: int, wait_s: float) -> bool:
        """Read some of the groups still lacking, the carry first; return whether there were any.

        `step` is the step that would train them.
        """
        count = min(self._ready_groups.lacking, self._backlog.num_groups_in(_READ_BYTES))
        if self._ready_groups.unread:
            ids = self._ready_groups.unread[:count]
            for entry in self._stream.fetch("train", ids):
                del self._ready_groups.unread[0]
                if entry is not None:  # None: lost by Redis, and reconciling has issued its ticket again
                    self._accept(entry, step)
            return True
        entries = self._stream.read("train", after=self.cursor, count=count, block_ms=int(wait_s * 1000))
        for entry in entries:
            self._wait_timers.group_came()  # not for groups read again: they show nothing about the workers
            self.cursor = entry.id
            self._accept(entry, step)
            crashpoint("group.read")
        return bool(entries)

    def drop_stale(self, step: int) -> None:
        """Drop groups that went stale in hand; happens only if the most urgent groups are trained first."""
        for held in self._ready_groups:
            if self._lag.is_stale(held.header.min_version, held.header.max_version, step):
                self.end(self._ready_groups.remove(held.header.ticket).header, f"{DROPPED}stale", step=step)

    def end(self, header: GroupHeader, outcome: str, *, step: int) -> None:
        """End the ticket that this group answers."""
        self._ledger.resolve(header.ticket, outcome, step=step + 1, answered=header.identity)
        self._lengths.count(header, dropped=outcome != TRAINED)
        self._datasets.count(header, outcome=outcome, step=step)
        if outcome not in NOT_OURS:
            self._dispatch.answered(header)

    def set_aside(self, entry_id: str, number: int, reason: str) -> None:
        """Ignore a group; its ticket stays as it is."""
        self._ledger.ignore(reason)
        if reason == LATE_FAILURE or (reason == NOT_ASKED and not self._gate.still_waits(number)):
            self._wait_timers.reconcile_soon()  # Redis and the ledger disagree
        if reason in (NOT_ASKED, NOT_LEASED) and self._ledger.ignored[reason].bit_count() == 1:  # 1, 2, 4, 8, ...
            count = self._ledger.ignored[reason]
            log.warning("group set aside", entry=entry_id, ticket=number, reason=reason, so_far=count)

    def _accept(self, entry: Entry, step: int) -> None:
        """Take the group for training, drop its ticket, count a failure, or ignore it. The ranks check bodies."""
        num_bytes = len(entry.header) + len(entry.body)
        self._backlog.add(entry.id, num_bytes)
        header = self._gate.header(entry)
        reason = self._gate.reason_to_ignore(entry, header)
        if reason is not None:
            self.set_aside(entry.id, entry.number, reason)
        elif header is None:
            self._ledger.resolve(entry.number, f"{DROPPED}malformed", step=step + 1)
        elif not header.failed:
            self._backlog.expect(num_bytes)
            self._failures.sound()
            self._keep_or_drop(entry, header, step)
        else:
            self._dispatch.failed(entry.number, error=header.error, step=step)
            self._failures.failed(self._tickets.prompt_of(entry.number), error=header.error)

    def _keep_or_drop(self, entry: Entry, header: GroupHeader, step: int) -> None:
        reason = self._reason_to_drop(header, step)
        if reason is None:
            self._ready_groups.take(ReadyGroup(entry.id, header, entry.body))
        else:
            self.end(header, f"{DROPPED}{reason}", step=step)

    def _reason_to_drop(self, header: GroupHeader, step: int) -> str | None:
        if header.fingerprint != self._gate.fingerprint:
            return "wrong_model"
        if self._lag.is_stale(header.min_version, header.max_version, step):
            return "stale"
        return QUARANTINED if self._quarantine.holds(header.ticket) else self._reason_of_algorithm(header)
