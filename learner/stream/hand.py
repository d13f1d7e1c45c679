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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from learner.stream.lag import LagRule
from learner.stream.ledger import Ledger
from learner.stream.plan import PlanEntry
from streamrl.wire.group import GroupHeader

_MOST_KEPT_BYTES = 256 << 20  # of bodies; what is beyond is read again by whoever trains it


@dataclass(frozen=True, slots=True)
class Held:
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


class Hand:
    def __init__(self, *, ledger: Ledger, lag: LagRule, groups_per_step: int, carry: Sequence[str]) -> None:
        self._ledger, self._lag, self._groups_per_step = ledger, lag, groups_per_step
        self._held: dict[int, Held] = {}  # by ticket, in the stream's order
        self._num_kept_bytes = 0
        self.unread = list(carry)  # entry ids

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._held

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def take(self, held: Held) -> None:
        num_bytes = len(held.body or b"")
        if self._num_kept_bytes + num_bytes > _MOST_KEPT_BYTES:
            held, num_bytes = replace(held, body=None), 0
        self._num_kept_bytes += num_bytes
        self._held[held.header.ticket] = held

    def remove(self, ticket: int) -> Held:
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

    def batch(self) -> list[Held]:
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
