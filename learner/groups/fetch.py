"""A rank's groups of a plan: fetched from the stream and verified, since none of their content is trusted.

Rank 0, which has read them all, has most of its own already. Entries do not change until a commit trims them, so any
rank may read them at any time. An entry that is missing anyway was lost by Redis; its ticket is issued again. Blocks on
Redis, within its limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog

from streamrl.errors import WireError
from streamrl.learner.groups.plan import GroupCheck, Plan, PlanEntry
from streamrl.protocol.transport.types import Entry, GroupStream
from streamrl.protocol.wire.group import Group, GroupHeader, decode_body, decode_header
from streamrl.protocol.wire.routes import RouteShape
from streamrl.protocol.wire.sample import Sample

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """One rank's groups of a plan, and its verdicts."""

    groups: tuple[Group, ...]  # the sound ones, in the plan's order
    verdicts: npt.NDArray[np.float64]  # [entries of the plan]; the maximum over all ranks counts
    num_masked: int  # tokens of sound groups that are too old for a loss

    def agreed(self, verdicts: Sequence[GroupCheck]) -> tuple[Group, ...]:
        """This rank's groups that all ranks holding them found sound."""
        own_sound = np.flatnonzero(self.verdicts == GroupCheck.SOUND).tolist()
        return tuple(
            group for at, group in zip(own_sound, self.groups, strict=True) if verdicts[at] is GroupCheck.SOUND
        )


def fetch_groups(
    stream: GroupStream,
    plan: Plan,
    *,
    rank: int,
    vocabulary: int,
    oldest_step: int = 0,
    needs_teacher: bool = False,
    routes: RouteShape | None = None,
) -> Fetched:
    """Read and verify this rank's groups of the plan.

    Tokens of versions before `oldest_step` get no loss. `needs_teacher`: samples must carry a teacher's log-probs.
    `routes`: samples must carry expert routes of this shape.
    """
    own_entries = plan.of_rank(rank)
    lacking = [planned.entry_id for _, planned in own_entries if planned.opened is None]
    entries = dict(zip(lacking, stream.fetch("train", lacking), strict=True)) if lacking else {}
    groups: list[Group] = []
    verdicts = np.zeros(len(plan.entries))
    num_masked = 0
    for at, planned in own_entries:
        verdict, group, masked = _check(planned, entries.get(planned.entry_id), vocabulary, oldest_step, routes)
        problem = group and _missing_part(group, needs_teacher=needs_teacher, routed=routes is not None)
        if problem:
            log.warning("group refused", ticket=planned.ticket, error=problem)
            verdict, group = GroupCheck.MALFORMED, None
        verdicts[at] = verdict
        if group is not None:
            groups.append(group)
            num_masked += masked
    return Fetched(groups=tuple(groups), verdicts=verdicts, num_masked=num_masked)


def _missing_part(group: Group, *, needs_teacher: bool, routed: bool) -> str:
    """What the group lacks, in words; empty: nothing."""
    if needs_teacher and any(sample.teacher_logprobs is None for sample in group.samples):
        return "it has no teacher log-probs"
    if routed and any(sample.routes is None and len(sample.token_ids) for sample in group.samples):
        return "it has no expert routes, which algorithm.routing_replay requires"
    return ""


def _check(
    planned: PlanEntry, entry: Entry | None, vocabulary: int, oldest_step: int, routes: RouteShape | None
) -> tuple[GroupCheck, Group | None, int]:
    """(verdict, the group if it is sound, number of masked tokens)"""
    try:
        opened = planned.opened or _open(planned, entry)
        if opened is None:
            log.warning("group lost", ticket=planned.ticket, entry=planned.entry_id)
            return GroupCheck.MISSING, None, 0
        group, num_masked = mask_before(decode_body(*opened, vocabulary=vocabulary, routes=routes), oldest_step)
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


def mask_before(group: Group, oldest_step: int) -> tuple[Group, int]:
    """(the group without loss on tokens of versions before `oldest_step`, how many tokens lost theirs)"""
    if oldest_step <= 0 or all(span.step >= oldest_step for sample in group.samples for span in sample.spans):
        return group, 0
    samples = tuple(_mask_sample(sample, oldest_step) for sample in group.samples)
    return replace(group, samples=samples), num_trained(group.samples) - num_trained(samples)


def num_trained(samples: Iterable[Sample]) -> int:
    """Tokens that have a loss."""
    return sum(sum(sample.mask_runs[::2]) for sample in samples)


def _mask_sample(sample: Sample, oldest_step: int) -> Sample:
    mask = sample.loss_mask()
    for span in sample.spans:
        if span.step < oldest_step:
            mask[span.start : span.end] = False
    return sample._replace(mask_runs=_to_runs(mask))


def _to_runs(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:  # [T]
    """Run lengths, alternating trained / not trained, as a sample stores them."""
    if len(mask) == 0:
        return ()
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    runs = np.diff(bounds).tolist()
    return tuple(runs) if mask[0] else (0, *runs)
