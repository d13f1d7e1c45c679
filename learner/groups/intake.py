"""Reads what workers delivered, in the stream's order, and decides what becomes of each group.

    groups ──► accept: whose, valid (`Gate`), how old (`lag`), worth training? ──► ready
                  └──► its ticket is dropped, a failure counted (`FailuresInRow`), or the group set aside

Anyone with access to the stream can write anything, so the gate checks an entry from the outside in:

    of this run, for an open ticket ─► delivered by the lease's holder ─► the ticket's identity ─► a valid header

Only the holder of a ticket's lease may end it. Delivery removes the ticket from Redis and records the ticket's entry in
one step; an entry written any other way lacks that, and counts for nothing. A forger would still have to remove the
ticket. So an entry that would end a ticket without answering it (a failure, an unreadable group, or one of another
model) counts only if the ticket is no longer waiting. Such entries are few; each costs one query to Redis, and sound
ones none.

An answer with another identity does not count either, even under one of our numbers: it is of another lineage of the
run's history, left by a Redis that switched between copies of itself.

No content of a group can stop the intake. Blocks on Redis, at most as long as it may wait for groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from streamrl.crashpoints import crashpoint
from streamrl.errors import TrainingError, WireError
from streamrl.learner.groups.counts import NOT_OURS, Datasets, Lengths
from streamrl.learner.groups.dispatch import Dispatch
from streamrl.learner.groups.ledger import DEAD, DROPPED, TRAINED, Ledger
from streamrl.learner.groups.plan import Books, ReadyGroup, ReadyGroups
from streamrl.learner.groups.prompts import Prompt
from streamrl.learner.groups.quarantine import QUARANTINED, Quarantine
from streamrl.learner.groups.tickets import Tickets
from streamrl.learner.groups.waiting import WaitTimers
from streamrl.protocol.transport.types import START, Entry, GroupStream, entry_order
from streamrl.protocol.wire.group import GroupHeader, decode_header

LATE_FAILURE = "late_failure"
NOT_ASKED = "not_asked"  # the ticket asks for something else
NOT_LEASED = "not_leased"  # its writer held no lease
_READ_BYTES = 1 << 20  # approximate size of a read: larger replies cost more memory and gain nothing
_SHOWN_CHARS = 80  # of a prompt

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
        """Read some of the groups still lacking, those to be read again first; return whether there were any.

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
        """Drop ready groups that went stale; happens only if the most urgent groups are trained first."""
        for group in self._ready_groups:
            if self._lag.is_stale(group.header.min_version, group.header.max_version, step):
                self.end(self._ready_groups.remove(group.header.ticket).header, f"{DROPPED}stale", step=step)

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


class Gate:
    """Decides whether an entry of the groups' stream counts for this run."""

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


class FailuresInRow:
    """Stops the run when only failures arrive, which no single prompt can cause.

    A reward that always raises, or an engine that refuses everything, would turn all data into dead letters, and the
    run would end as if it had trained. Failures that were in the stream before this learner started do not count: the
    cause may have been fixed since.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0
        self._newest_existing: str | None = None  # newest entry in the stream when this learner started
        self.latest = ""  # the latest failure: prompt and error

    def note_existing(self, entry_ids: Iterable[str]) -> None:
        """Note the entries in the stream; only the first call counts."""
        if self._newest_existing is None:
            self._newest_existing = max(entry_ids, key=entry_order, default=START)

    def is_old(self, entry_id: str) -> bool:
        return self._newest_existing is not None and entry_order(entry_id) <= entry_order(self._newest_existing)

    def sound(self) -> None:
        """Note a group without a failure."""
        self._count = 0

    def failed(self, prompt: Prompt | None, *, error: str) -> None:
        """Count a failure. `prompt` is None in a replay that does not know it."""
        self._count += 1
        self.latest = f"{self._describe(prompt)}: {error}"
        if self._count >= self._limit:
            raise TrainingError(
                f"{self._count} groups in a row failed (training.max_failed_in_row). The latest, {self.latest}. "
                "Fix the cause and start the run again: it resumes from its last checkpoint"
            )

    def check_trained(self, ledger: Ledger) -> None:
        if ledger.outcomes[TRAINED]:
            return
        endings = [f"{count} dropped as {reason}" for reason, count in ledger.dropped()]
        if num_dead := ledger.outcomes[DEAD]:
            endings.append(f"{num_dead} failed for good (the latest, {self.latest})")
        if ledger.outstanding:  # in a replay
            endings.append(f"{ledger.outstanding} without an answer, or too few for a step")
        raise TrainingError(
            f"the data is used up and no step was made: of {ledger.issued} groups {'; '.join(endings)}. "
            "`streamrl groups` shows answers and their rewards; fix the cause and start the run again"
        )

    @staticmethod
    def _describe(prompt: Prompt | None) -> str:
        if prompt is None:
            return "a prompt"
        text = prompt.text if len(prompt.text) <= _SHOWN_CHARS else f"{prompt.text[:_SHOWN_CHARS]}..."
        return f"prompt {text!r} (line {prompt.line})"
