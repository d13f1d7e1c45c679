"""The groups in hand: read, sound by their headers, and not resolved. A batch is taken out of them.

Beside them are those that have been read once and have yet to be read again: a checkpoint's carry, and what was in hand
when Redis was in trouble.

They are trained in the order in which they came, a batch as soon as it is full. With `lag.stale: wait` the bound on lag
is kept by timing instead: the most urgent go first, and a batch waits while some ticket that is not in hand would be
too old if the step were made without it:

    a ticket begun with weights of step b is too old after step b + max_steps: its deadline
    the tickets outside the batch, by deadline, need the steps to come:   d_0 d_1 | d_2 d_3 | ...   a batch each
    so the step may be made when   d_i >= step + 1 + i // groups_per_step   for every i

Since no more tickets are out than there are places in the steps up to the last deadline (`LagRule.batches_ahead`), a
batch by deadline always exists once their groups are there. Pure: who waits, and how long at most, is the feed's.

Bodies are kept as far as memory allows, for the rank that reads the stream trains on some of them itself.

What a delivered group is worth, by its header: train on it, drop its ticket, count a failure, or ignore the message.

Whoever may write to the stream may write anything, so every entry is looked at from the outside in: is it of this run,
does it parse, is it about a ticket that is open, was it made by the right model, is it fresh enough, does the algorithm
want it. The bodies are the ranks' business. Pure: no Redis, nothing that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from streamrl.errors import WireError
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import Ledger
from streamrl.learner.groups.plan import PlanEntry
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import GroupHeader, decode_header

_MOST_KEPT_BYTES = 256 << 20  # of bodies; what is beyond is read again by whoever trains it


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that waits for its batch, or for the verdict on it."""

    entry_id: str
    header: GroupHeader
    body: bytes | None  # None: not kept

    def planned(self, rank: int) -> PlanEntry:
        return PlanEntry(
            entry_id=self.entry_id,
            ticket=self.header.ticket,
            digest=self.header.digest,
            num_tokens=self.header.num_tokens,
            rank=rank,
            opened=(self.header, self.body) if rank == 0 and self.body is not None else None,
        )


class ReadyGroups:
    def __init__(self, *, ledger: Ledger, lag: LagRule, groups_per_step: int, carry: Sequence[str]) -> None:
        self._ledger, self._lag, self._groups_per_step = ledger, lag, groups_per_step
        self._held: dict[int, ReadyGroup] = {}  # by ticket, in the stream's order
        self._num_kept_bytes = 0
        self.unread = list(carry)  # entry ids

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._held

    def __iter__(self) -> Iterator[ReadyGroup]:
        return iter(list(self._held.values()))

    def take(self, held: ReadyGroup) -> None:
        num_bytes = len(held.body or b"")
        if self._num_kept_bytes + num_bytes > _MOST_KEPT_BYTES:
            held, num_bytes = replace(held, body=None), 0
        self._num_kept_bytes += num_bytes
        self._held[held.header.ticket] = held

    def remove(self, ticket: int) -> ReadyGroup:
        held = self._held.pop(ticket)
        self._num_kept_bytes -= len(held.body or b"")
        return held

    def put_back(self) -> None:
        """Everything is to be read again."""
        self.unread = self.all_ids()
        self._held.clear()
        self._num_kept_bytes = 0

    def all_ids(self) -> list[str]:
        """Entries that were read and are still needed."""
        return [*(held.entry_id for held in self._held.values()), *self.unread]

    @property
    def num_read(self) -> int:
        return len(self._held) + len(self.unread)

    @property
    def lacking(self) -> int:
        """How many groups are worth reading: what the batch lacks; or all, when the most urgent are chosen."""
        batches = self._lag.max_steps + 1 if self._lag.stale == "wait" else 1
        return max(1, batches * self._groups_per_step - len(self._held))

    def batch(self) -> list[ReadyGroup]:
        """What a step would train now, at most a full batch."""
        groups = list(self._held.values())
        if self._lag.stale == "wait":
            groups.sort(key=lambda held: self._deadline(held.header.ticket))
        return groups[: self._groups_per_step]

    def awaited(self, step: int) -> int:
        """How many tickets a batch should wait for, because the steps left are too few for them without this one."""
        if self._lag.stale != "wait":
            return 0
        in_batch = {held.header.ticket for held in self.batch()}
        left = [number for number in self._ledger.open_tickets() if number not in in_batch]
        # What is past its deadline cannot be helped by waiting.
        urgent = sorted((d, number) for number in left if (d := self._deadline(number)) >= step)
        late = [at for at, (d, _) in enumerate(urgent) if d < step + 1 + at // self._groups_per_step]
        # The last that would be late is so for all before it, as far as they are not in hand.
        return sum(number not in self._held for _, number in urgent[: late[-1] + 1]) if late else 0

    def _deadline(self, ticket: int) -> int:
        return self._ledger.begun_at(ticket) + self._lag.max_steps


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

    def __call__(self, entry: Entry, *, step: int, ready_groups: Container[int]) -> Judgement:
        """`step` is the one that would train this group; `in_hand` holds the tickets that wait with it."""
        if entry.run_uid != self.run_uid:
            return Ignore("wrong_run")
        header = self._header(entry)
        if entry.number < 0 or entry.number >= self.ledger.issued:
            return Ignore("unknown_ticket" if header else "malformed")
        if entry.number in ready_groups or not self.ledger.is_open(entry.number):
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
