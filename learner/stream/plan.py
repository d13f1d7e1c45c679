"""The plan of a step: which groups are trained, and which rank takes each. Rank 0 makes it, all ranks follow it."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from streamrl.wire.group import GroupHeader


class Kind(IntEnum):
    """What the ranks do next."""

    IDLE = 0  # nothing to train yet; go round again
    STEP = 1
    END = 2  # every ticket of the run is resolved
    STOP = 3  # told to stop, or drained; tickets are left
    COMMIT = 4  # Redis is short of room, and a checkpoint would make some: make one now
    PUBLISH = 5  # Redis lost what the newest version consists of: send the weights out whole


class Outcome(IntEnum):
    """Of something that all ranks wait for together."""

    WAITING = 0  # still
    DONE = 1
    STOPPED = 2  # told to stop before


class Verdict(IntEnum):
    """What the rank whose group it is found out about it. Added up over the ranks, of which all but that one say
    nothing, these are the verdicts on a whole plan."""

    MALFORMED = 0
    SOUND = 1
    MISSING = 2  # not in the stream any more
    STALE = 3  # none of its tokens is young enough to have a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    entry_id: str
    ticket: int
    digest: int  # xxh3_64 of the group's body
    num_tokens: int
    rank: int  # who fetches, verifies and trains it
    # What rank 0 has read of its own groups already, header and body; it does not travel.
    opened: tuple[GroupHeader, bytes] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    kind: Kind
    step: int
    entries: tuple[PlanEntry, ...] = ()  # in the stream's order

    def of_rank(self, rank: int) -> list[tuple[int, PlanEntry]]:
        """This rank's entries, each with its place in `entries`, which is its place in the accept vector."""
        return [(at, entry) for at, entry in enumerate(self.entries) if entry.rank == rank]

    def to_bytes(self) -> bytes:
        entries = [[one.entry_id, one.ticket, one.digest, one.num_tokens, one.rank] for one in self.entries]
        return json.dumps([self.kind, self.step, entries]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        kind, step, entries = json.loads(data)
        return Plan(
            kind=Kind(kind),
            step=step,
            entries=tuple(
                PlanEntry(entry_id=entry_id, ticket=ticket, digest=digest, num_tokens=num_tokens, rank=rank)
                for entry_id, ticket, digest, num_tokens, rank in entries
            ),
        )


def balance(num_tokens: Sequence[int], world_size: int) -> list[int]:
    """The rank of each group, such that all ranks get about the same number of tokens.

    The longest first, each to the rank with the least so far: never worse than 4/3 of the best there is.
    """
    loads = [(0, rank) for rank in range(world_size)]
    ranks = [0] * len(num_tokens)
    for at in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        load, rank = heapq.heappop(loads)
        ranks[at] = rank
        heapq.heappush(loads, (load + num_tokens[at], rank))
    return ranks
