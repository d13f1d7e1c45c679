"""The plan of a step: which groups are trained, and which rank takes each. Rank 0 makes it, all ranks follow it.

Each rank takes its own groups out of the stream and looks at them: nothing in them is trusted. Rank 0, which
has read them all, has most of its own already.

Entries do not change until they are trimmed, which only a commit does, so any rank may read them at any time. One that
is gone all the same was lost with Redis; its ticket is asked for again. Blocks on Redis within its bounds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import structlog

from streamrl.errors import WireError
from streamrl.learner.groups.lag import mask_before, num_trained
from streamrl.protocol.transport.types import Entry, GroupStream
from streamrl.protocol.wire.group import Group, GroupHeader, decode_body, decode_header


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


class GroupCheck(IntEnum):
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


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What one rank found of a plan."""

    groups: tuple[Group, ...]  # the sound ones, in the plan's order
    verdicts: npt.NDArray[np.float64]  # [entries of the plan] as numbers to be added up over the ranks
    num_masked: int  # tokens of the sound groups that are too old for a loss


def fetch_groups(stream: GroupStream, plan: Plan, *, rank: int, vocabulary: int, oldest_step: int = 0) -> Fetched:
    """Tokens of versions before `oldest_step` get no loss."""
    mine = plan.of_rank(rank)
    lacking = [planned.entry_id for _, planned in mine if planned.opened is None]
    entries = dict(zip(lacking, stream.fetch("train", lacking), strict=True)) if lacking else {}
    groups: list[Group] = []
    verdicts = np.zeros(len(plan.entries))
    num_masked = 0
    for at, planned in mine:
        verdict, group, masked = _look_at(planned, entries.get(planned.entry_id), vocabulary, oldest_step)
        verdicts[at] = verdict
        if group is not None:
            groups.append(group)
            num_masked += masked
    return Fetched(groups=tuple(groups), verdicts=verdicts, num_masked=num_masked)


def _look_at(
    planned: PlanEntry, entry: Entry | None, vocabulary: int, oldest_step: int
) -> tuple[GroupCheck, Group | None, int]:
    """(verdict, the group to be trained, if it is sound, tokens that were masked)"""
    try:
        opened = planned.opened or _open(planned, entry)
        if opened is None:
            log.warning("group lost", ticket=planned.ticket, entry=planned.entry_id)
            return GroupCheck.MISSING, None, 0
        group, num_masked = mask_before(decode_body(*opened, vocabulary=vocabulary), oldest_step)
    except WireError as error:
        log.warning("group refused", ticket=planned.ticket, entry=planned.entry_id, error=str(error))
        return GroupCheck.MALFORMED, None, 0
    if num_masked and not num_trained(group.samples):
        return GroupCheck.STALE, None, 0
    return GroupCheck.SOUND, group, num_masked


def _open(planned: PlanEntry, entry: Entry | None) -> tuple[GroupHeader, bytes] | None:
    if entry is None:
        return None
    header = decode_header(entry.header)
    if (header.ticket, header.digest) != (planned.ticket, planned.digest):
        raise WireError("the entry is not the one that was planned")
    return header, entry.body
