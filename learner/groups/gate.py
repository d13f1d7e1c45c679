"""Decides whether an entry of the groups' stream counts for this run.

Anyone with access to the stream can write anything, so an entry is checked from the outside in:

    of this run, for an open ticket ─► delivered by the lease's holder ─► the ticket's identity ─► a valid header

Only the holder of a ticket's lease may end it. Delivery removes the ticket from Redis and records the ticket's entry in
one step; an entry written any other way lacks that, and counts for nothing. A forger would still have to remove the
ticket. So an entry that would end a ticket without answering it (a failure, an unreadable group, or one of another
model) counts only if the ticket is no longer waiting. Such entries are few; each costs one query to Redis, and sound
ones none.

An answer with another identity does not count either, even under one of our numbers: it is of another lineage of the
run's history, left by a Redis that switched between copies of itself.
"""

from __future__ import annotations

from streamrl.errors import WireError
from streamrl.learner.groups.failures import FailuresInRow
from streamrl.learner.groups.ledger import Ledger
from streamrl.learner.groups.plan import ReadyGroups
from streamrl.protocol.transport.types import Entry, GroupStream
from streamrl.protocol.wire.group import GroupHeader, decode_header

LATE_FAILURE = "late_failure"
NOT_ASKED = "not_asked"  # the ticket asks for something else
NOT_LEASED = "not_leased"  # its writer held no lease


class Gate:
    def __init__(
        self,
        *,
        stream: GroupStream,
        ledger: Ledger,
        ready_groups: ReadyGroups,
        failures: FailuresInRow,
        run_uid: str,
        fingerprint: str,  # of model and tokenizer; groups must carry it
        max_samples: int,  # samples per ticket
    ) -> None:
        self._stream, self._ledger, self._ready_groups, self._failures = stream, ledger, ready_groups, failures
        self._run_uid, self._max_samples = run_uid, max_samples
        self.fingerprint = fingerprint

    def header(self, entry: Entry) -> GroupHeader | None:
        """The decoded header; None unless it is a training group's header for this very ticket."""
        try:
            header = decode_header(entry.header)
        except WireError:
            return None
        expected = (entry.number, entry.identity, self._run_uid, "train")
        fits = (header.ticket, header.identity, header.run_uid, header.purpose) == expected
        return header if fits and len(header.sample_lengths) <= self._max_samples else None

    def reason_to_ignore(self, entry: Entry, header: GroupHeader | None) -> str | None:
        """Why the entry is ignored; None: it decides its ticket."""
        number = entry.number
        if entry.run_uid != self._run_uid:
            return "wrong_run"
        if not 0 <= number < self._ledger.issued:
            return "unknown_ticket" if header else "malformed"
        if number in self._ready_groups or not self._ledger.is_open(number):
            return "duplicate"
        if not entry.ticket_entry:
            return NOT_LEASED
        if not self._ledger.confirm_identity(number, entry.identity):
            return NOT_ASKED
        if header is not None and header.failed and self._is_late(entry, header):
            return LATE_FAILURE
        is_sound = header is not None and not header.failed and header.fingerprint == self.fingerprint
        return None if is_sound or not self.still_waits(number) else NOT_LEASED

    def still_waits(self, number: int) -> bool:
        """Whether our ticket is still in Redis, undelivered."""
        found = (identity for waiting, identity in self._stream.waiting("train") if waiting == number)
        return any(self._ledger.confirm_identity(number, identity) for identity in found)

    def _is_late(self, entry: Entry, header: GroupHeader) -> bool:
        """Whether this failure no longer matters.

        Either it is of an earlier attempt that was counted already (also if Redis rolled back and handed that attempt
        out again), or it predates this learner.
        """
        return header.attempt < self._ledger.attempts(entry.number) or self._failures.is_old(entry.id)
