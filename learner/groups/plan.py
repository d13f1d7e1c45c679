"""Groups that are ready to be trained, and the plan of a step made from them: which groups, and by which rank.

Rank 0 makes the plan, and all ranks follow it (`fetch`).

Ready are groups that were read, have a sound header and are not resolved. `unread` holds entries that must be read
again: a checkpoint's carry, and what was ready when Redis failed. Groups are trained in their order of arrival, a
batch as soon as it is full. With `lag.stale: wait` timing bounds the lag instead: the most urgent go first, and a batch
waits while some ticket that is not ready would be too old if the step were made without it:

    a ticket begun with weights of step b is too old after step b + max_steps: its deadline
    tickets outside the batch, by deadline, fill the steps to come:       d_0 d_1 | d_2 d_3 | ...   a batch each
    so the step may be made when   d_i >= step + 1 + i // groups_per_step   for every i

Since no more tickets are outstanding than fit into the steps up to the last deadline (`LagRule.batches_ahead`), a batch
that meets all deadlines exists once their groups have arrived. The feed decides how long a batch waits.

Bodies are kept as far as memory allows, since rank 0 trains some of them itself. Blocks on nothing.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from streamrl.learner.groups.backlog import Backlog
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import Ledger
from streamrl.protocol.wire.group import GroupHeader

_MAX_KEPT_BYTES = 256 << 20  # of bodies; those beyond are read again by the rank that trains them


class Kind(IntEnum):
    """What the ranks do next."""

    IDLE = 0  # nothing to train yet; ask for the next plan
    STEP = 1
    END = 2  # complete: the data are used up, or max_steps are made
    STOP = 3  # before that: by the operator, a signal or max_time, or drained
    COMMIT = 4  # checkpoint now: Redis is short of room, and a commit frees some
    PUBLISH = 5  # Redis lost parts of the newest version: publish the weights in full


class Outcome(IntEnum):
    """The state of something that all ranks wait for together."""

    WAITING = 0  # not finished
    DONE = 1
    STOPPED = 2  # stopped before it finished


class GroupCheck(IntEnum):
    """A rank's verdict on a group; ranks that do not hold it report 0, and the largest is the final verdict.

    If one rank of a context group lacks a group, none of them can train it.
    """

    SOUND = 1
    STALE = 2  # all its tokens are too old to have a loss
    MISSING = 3  # no longer in the stream
    MALFORMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    entry_id: str
    ticket: int
    digest: int  # xxh3_64 of the group's body
    rank: int  # the `World.data_rank` that fetches, verifies and trains it
    # Header and body that rank 0 has already read of its own groups; not broadcast.
    opened: tuple[GroupHeader, bytes] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    kind: Kind
    step: int
    entries: tuple[PlanEntry, ...] = ()  # in the stream's order
    num_answered: int = 0  # tickets that ended with an answer before this step: how far the data are used up

    def of_rank(self, rank: int) -> list[tuple[int, PlanEntry]]:
        """This rank's entries, each with its index in `entries`, which is its index in the verdicts."""
        return [(at, entry) for at, entry in enumerate(self.entries) if entry.rank == rank]

    def to_bytes(self) -> bytes:
        entries = [[one.entry_id, one.ticket, one.digest, one.rank] for one in self.entries]
        return json.dumps([self.kind, self.step, entries, self.num_answered]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        kind, step, entries, num_answered = json.loads(data)
        return Plan(
            kind=Kind(kind),
            step=step,
            entries=tuple(
                PlanEntry(entry_id=entry_id, ticket=ticket, digest=digest, rank=rank)
                for entry_id, ticket, digest, rank in entries
            ),
            num_answered=num_answered,
        )


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group that waits for its batch, or for its verdict."""

    entry_id: str
    header: GroupHeader
    body: bytes | None  # None: not kept

    def planned(self, rank: int) -> PlanEntry:
        return PlanEntry(
            entry_id=self.entry_id,
            ticket=self.header.ticket,
            digest=self.header.digest,
            rank=rank,
            opened=(self.header, self.body) if rank == 0 and self.body is not None else None,
        )


class ReadyGroups:
    def __init__(self, *, ledger: Ledger, lag: LagRule, groups_per_step: int, carry: Sequence[str]) -> None:
        self._ledger, self._lag, self._groups_per_step = ledger, lag, groups_per_step
        self._ready: dict[int, ReadyGroup] = {}  # by ticket, in the stream's order
        self._num_kept_bytes = 0
        self.unread = list(carry)  # entry ids

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._ready

    def __iter__(self) -> Iterator[ReadyGroup]:
        return iter(list(self._ready.values()))

    def take(self, group: ReadyGroup) -> None:
        num_bytes = len(group.body or b"")
        if self._num_kept_bytes + num_bytes > _MAX_KEPT_BYTES:
            group, num_bytes = replace(group, body=None), 0
        self._num_kept_bytes += num_bytes
        self._ready[group.header.ticket] = group

    def remove(self, ticket: int) -> ReadyGroup:
        group = self._ready.pop(ticket)
        self._num_kept_bytes -= len(group.body or b"")
        return group

    def put_back(self) -> None:
        """Mark everything to be read again."""
        self.unread = self.all_ids()
        self._ready.clear()
        self._num_kept_bytes = 0

    def all_ids(self) -> list[str]:
        """Entries that were read and are still needed."""
        return [*(group.entry_id for group in self._ready.values()), *self.unread]

    @property
    def num_read(self) -> int:
        return len(self._ready) + len(self.unread)

    @property
    def lacking(self) -> int:
        """How many groups to read: what the batch lacks; with `lag.stale: wait`, all outstanding ones."""
        batches = self._lag.max_steps + 1 if self._lag.stale == "wait" else 1
        return max(1, batches * self._groups_per_step - len(self._ready))

    def batch(self) -> list[ReadyGroup]:
        """What a step would train now, at most a full batch."""
        groups = list(self._ready.values())
        if self._lag.stale == "wait":
            groups.sort(key=lambda group: self._deadline(group.header.ticket))
        return groups[: self._groups_per_step]

    def awaited(self, step: int) -> int:
        """How many tickets a batch should wait for, because the remaining steps cannot fit them otherwise."""
        if self._lag.stale != "wait":
            return 0
        in_batch = {group.header.ticket for group in self.batch()}
        left = [number for number in self._ledger.open_tickets() if number not in in_batch]
        # Waiting does not help tickets past their deadline.
        urgent = sorted((d, number) for number in left if (d := self._deadline(number)) >= step)
        late = [at for at, (d, _) in enumerate(urgent) if d < step + 1 + at // self._groups_per_step]
        # The last late ticket needs all those before it that are not ready.
        return sum(number not in self._ready for _, number in urgent[: late[-1] + 1]) if late else 0

    def _deadline(self, ticket: int) -> int:
        return self._ledger.first_weights_step(ticket) + self._lag.max_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What the learner keeps of its tickets and their groups: one set of books, which the feed's parts share."""

    ledger: Ledger  # what became of each ticket
    lag: LagRule  # which versions there are, and what is too old
    ready_groups: ReadyGroups  # to be trained, or to be read again
    backlog: Backlog  # bytes in Redis


def balance(num_tokens: Sequence[int], world_size: int) -> list[int]:
    """Assign groups to ranks so that all ranks get about the same number of tokens.

    Longest first, each to the rank with the fewest so far: never worse than 4/3 of the optimum.
    """
    loads = [(0, rank) for rank in range(world_size)]
    ranks = [0] * len(num_tokens)
    for at in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        load, rank = heapq.heappop(loads)
        ranks[at] = rank
        heapq.heappush(loads, (load + num_tokens[at], rank))
    return ranks
