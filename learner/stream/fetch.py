"""Each rank takes its own groups out of the stream and looks at them: nothing in them is trusted. Rank 0, which
has read them all, has most of its own already.

Entries do not change until they are trimmed, which only a commit does, so any rank may read them at any time. One that
is gone all the same was lost with Redis; its ticket is asked for again. Blocks on Redis within its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from learner.stream.lag import mask_before, num_trained
from learner.stream.plan import Plan, PlanEntry, Verdict
from streamrl.errors import WireError
from streamrl.transport.seam import GroupStream
from streamrl.transport.types import Entry
from streamrl.wire.group import Group, GroupHeader, decode_body, decode_header

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
) -> tuple[Verdict, Group | None, int]:
    """(verdict, the group to be trained, if it is sound, tokens that were masked)"""
    try:
        opened = planned.opened or _open(planned, entry)
        if opened is None:
            log.warning("group lost", ticket=planned.ticket, entry=planned.entry_id)
            return Verdict.MISSING, None, 0
        group, num_masked = mask_before(decode_body(*opened, vocabulary=vocabulary), oldest_step)
    except WireError as error:
        log.warning("group refused", ticket=planned.ticket, entry=planned.entry_id, error=str(error))
        return Verdict.MALFORMED, None, 0
    if num_masked and not num_trained(group.samples):
        return Verdict.STALE, None, 0
    return Verdict.SOUND, group, num_masked


def _open(planned: PlanEntry, entry: Entry | None) -> tuple[GroupHeader, bytes] | None:
    if entry is None:
        return None
    header = decode_header(entry.header)
    if (header.ticket, header.digest) != (planned.ticket, planned.digest):
        raise WireError("the entry is not the one that was planned")
    return header, entry.body
