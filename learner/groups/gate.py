"""What an entry of the groups' stream is to this run. Whoever may write there may write anything, so it is looked at
from the outside in:

    of this run, about an open ticket ─► delivered by who held the ticket's lease ─► what the ticket asks ─► a header

Only the holder of a ticket's lease may end it. Its delivery takes the ticket out of Redis and names the ticket's entry,
in one step; what comes by another road lacks that name, and decides nothing. Who imitates it has yet to take the ticket
away: so whatever would end a ticket without having answered it, a failure, a group that cannot be read or one of
another model, counts only if the ticket no longer waits. Such entries are few, and Redis is asked for each of them, but
for no sound one.

Nor does an answer to something else count, though the number be ours: it is of another branch of the run's history,
where Redis went back and forth between copies of itself.
"""

from __future__ import annotations

from streamrl.errors import WireError
from streamrl.learner.groups.failures import FailuresInRow
from streamrl.learner.groups.ledger import Ledger
from streamrl.learner.groups.plan import ReadyGroups
from streamrl.protocol.transport.types import Entry, GroupStream
from streamrl.protocol.wire.group import GroupHeader, decode_header

LATE_FAILURE = "late_failure"
NOT_ASKED = "not_asked"  # for what it answers
NOT_LEASED = "not_leased"  # by who put it there


class Gate:
    def __init__(
        self,
        *,
        stream: GroupStream,
        ledger: Ledger,
        ready_groups: ReadyGroups,
        failures: FailuresInRow,
        run_uid: str,
        fingerprint: str,  # of model and tokenizer, as groups must carry it
        max_samples: int,  # what tickets ask for
    ) -> None:
        self._stream, self._ledger, self._ready_groups, self._failures = stream, ledger, ready_groups, failures
        self._run_uid, self._max_samples = run_uid, max_samples
        self.fingerprint = fingerprint

    def header(self, entry: Entry) -> GroupHeader | None:
        """None when it is no header of a training group for this very ticket."""
        try:
            header = decode_header(entry.header)
        except WireError:
            return None
        expected = (entry.number, entry.identity, self._run_uid, "train")
        fits = (header.ticket, header.identity, header.run_uid, header.purpose) == expected
        return header if fits and len(header.sample_lengths) <= self._max_samples else None

    def reason_to_ignore(self, entry: Entry, header: GroupHeader | None) -> str | None:
        """None: it decides its ticket."""
        number = entry.number
        if entry.run_uid != self._run_uid:
            return "wrong_run"
        if not 0 <= number < self._ledger.issued:
            return "unknown_ticket" if header else "malformed"
        if number in self._ready_groups or not self._ledger.is_open(number):
            return "duplicate"
        if not entry.ticket_entry:
            return NOT_LEASED
        if not self._ledger.asks(number, entry.identity):
            return NOT_ASKED
        if header is not None and header.failed and self._is_late(entry, header):
            return LATE_FAILURE
        is_sound = header is not None and not header.failed and header.fingerprint == self.fingerprint
        return None if is_sound or not self.still_waits(number) else NOT_LEASED

    def still_waits(self, number: int) -> bool:
        """Nobody has delivered this ticket of ours."""
        found = (identity for waiting, identity in self._stream.waiting("train") if waiting == number)
        return any(self._ledger.asks(number, identity) for identity in found)

    def _is_late(self, entry: Entry, header: GroupHeader) -> bool:
        """The failure of an earlier attempt has been counted, and another attempt is under way; or was, where a Redis
        that went back in time has given out the earlier one again. Or nobody has counted it."""
        return header.attempt < self._ledger.attempts(entry.number) or self._failures.is_old(entry.id)
