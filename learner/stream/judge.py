"""What a delivered group is worth, by its header: train on it, drop its ticket, count a failure, or ignore the message.

Whoever may write to the stream may write anything, so every entry is looked at from the outside in: is it of this run,
does it parse, is it about a ticket that is open, was it made by the right model, is it fresh enough, does the algorithm
want it. The bodies are the ranks' business. Pure: no Redis, nothing that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from learner.stream.lag import LagRule
from learner.stream.ledger import Ledger
from streamrl.errors import WireError
from streamrl.transport.types import Entry
from streamrl.wire.group import GroupHeader, decode_header

LATE_FAILURE = "late_failure"


@dataclass(frozen=True, slots=True)
class Take:
    header: GroupHeader


@dataclass(frozen=True, slots=True)
class Drop:
    """The ticket ends here."""

    reason: str
    header: GroupHeader | None = None  # where there is a sound one


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not fill the ticket."""

    error: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """The message decides no ticket."""

    reason: str


Judgement = Take | Drop | Failed | Ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    run_uid: str
    fingerprint: str  # of model and tokenizer
    max_samples: int  # what tickets ask for
    ledger: Ledger
    lag: LagRule
    keep: Callable[[GroupHeader], str | None]  # the algorithm's reason to drop a group, if it has one

    def __call__(self, entry: Entry, *, step: int, in_hand: Container[int]) -> Judgement:
        """`step` is the one that would train this group; `in_hand` holds the tickets that wait with it."""
        if entry.run_uid != self.run_uid:
            return Ignore("wrong_run")
        header = self._header(entry)
        if entry.number < 0 or entry.number >= self.ledger.issued:
            return Ignore("unknown_ticket" if header else "malformed")
        if entry.number in in_hand or not self.ledger.is_open(entry.number):
            return Ignore("duplicate")
        if header is None:
            return Drop("malformed")
        if header.failed:
            # The failure of an earlier attempt has been counted, and another attempt is under way; or was, where
            # a Redis that went back in time has given out the earlier one again.
            late = header.attempt < self.ledger.attempts(entry.number)
            return Ignore(LATE_FAILURE) if late else Failed(header.error)
        return self._weigh(header, step)

    def _header(self, entry: Entry) -> GroupHeader | None:
        """None when it is no header of a training group for this very ticket."""
        try:
            header = decode_header(entry.header)
        except WireError:
            return None
        expected = (entry.number, self.run_uid, "train")
        fits = (header.ticket, header.run_uid, header.purpose) == expected
        return header if fits and len(header.sample_lengths) <= self.max_samples else None

    def _weigh(self, header: GroupHeader, step: int) -> Judgement:
        if header.fingerprint != self.fingerprint:
            return Drop("wrong_model", header)
        if self.lag.is_stale(header.min_version, header.max_version, step):
            return Drop("stale", header)
        reason = self.keep(header)
        return Take(header) if reason is None else Drop(reason, header)
