"""Finds a group that kills the ranks, by the plan in progress when they died, and quarantines it.

A group may bring down the rank that trains it: out of memory, or a crashing kernel. Restarted ranks read the same
groups again, so the run would crash forever. Rank 0 therefore notes the plan before each step and clears it afterwards:

    death in a step, once          no change: most deaths have nothing to do with groups
    twice, no step between         tickets in both plans are suspects, trained one group a step, suspects first
    three times                    the plan was one suspect: it is dropped as "quarantined", its neighbours train
    a death between steps          not a group's fault: ranks die anyway, so one more death is needed, at most six

If ranks are killed often, a conviction may still be chance; then one group is lost to training, counted and journalled
like any dropped group. The note is in the run's folder, one file per term, since a replaced learner may still write its
own. It is written to a temporary file and renamed, so it survives the process; it need not survive the machine, whose
death no group causes, nor a full disk. Blocks on the disk only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter

QUARANTINED = "quarantined"
_DEATHS_TO_SUSPECT = 2
_DEATHS_TO_CONVICT = 3
_MAX_ELSEWHERE = 3  # limit, so that a killing group is found even if ranks also die for other reasons

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one learner leaves for the next. All fields but the counts hold ticket numbers."""

    plan: tuple[int, ...] = ()  # in training; empty between steps
    deaths: int = 0  # in a row, without a step in between
    elsewhere: int = 0  # learners since the first of these deaths that ended or died between steps
    suspects: tuple[int, ...] = ()  # tickets in the plans of all these deaths
    quarantined: tuple[int, ...] = ()


class Quarantine:
    def __init__(self, root: Path | None = None, *, term: int = 0) -> None:
        """Start from the note of the previous learner in the run's folder.

        Without a folder nothing is noted and no ticket suspected: a replay makes its steps as recorded, whatever
        crashes.
        """
        self._note, self._path = Note(), None
        if root is None:
            return
        folder = root / "suspects"
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{term:06d}.json"
        earlier = sorted(path for path in folder.glob("[0-9]*.json") if path < self._path)
        if earlier:
            self._note = _after(_read(earlier[-1]))
        if self._note.quarantined:
            log.warning("quarantined", tickets=self._note.quarantined)
        if self._is_searching:
            log.warning("ranks died in a row", deaths=self._note.deaths, suspects=self._note.suspects)
        self._write()
        for path in earlier:
            path.unlink(missing_ok=True)

    def holds(self, ticket: int) -> bool:
        """Whether this ticket's group must not be trained."""
        return ticket in self._note.quarantined

    def narrow(self, batch: Sequence[int]) -> Sequence[int]:
        """Which tickets of this batch to train now."""
        if not self._is_searching:
            return batch
        return [ticket for ticket in batch if ticket in self._note.suspects][:1] or batch

    def begin(self, batch: Sequence[int]) -> None:
        """Note that these tickets are trained next; call before the plan is broadcast."""
        self._note = replace(self._note, plan=tuple(batch))
        self._write()

    def survived(self) -> None:
        """Clear the plan: its step did no harm."""
        left = tuple(ticket for ticket in self._note.suspects if ticket not in self._note.plan)
        if left and self._note.deaths:
            self._note = replace(self._note, plan=(), suspects=left)
        else:
            self._note = Note(quarantined=self._note.quarantined)
        self._write()

    @property
    def _is_searching(self) -> bool:
        return self._note.deaths >= _DEATHS_TO_SUSPECT

    def _write(self) -> None:
        if self._path is None:
            return
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(asdict(self._note)))
            temporary.rename(self._path)
        except OSError as error:
            log.warning("plan not noted", error=str(error))


def _after(note: Note) -> Note:
    """The note with which the learner that finds `note` starts."""
    if not note.plan:
        return replace(note, elsewhere=min(note.elsewhere + 1, _MAX_ELSEWHERE) if note.deaths else 0)
    common = _common(note.plan, note.suspects)
    if not common:  # no ticket in common: not a group's fault
        return Note(deaths=1, suspects=note.plan, quarantined=note.quarantined)
    deaths = note.deaths + 1
    if deaths >= _DEATHS_TO_CONVICT + note.elsewhere and len(common) == 1:
        return Note(quarantined=(*note.quarantined, *common))
    return Note(deaths=deaths, elsewhere=note.elsewhere, suspects=common, quarantined=note.quarantined)


def _common(plan: tuple[int, ...], suspects: Collection[int]) -> tuple[int, ...]:
    return tuple(ticket for ticket in plan if ticket in suspects) if suspects else plan


def _read(path: Path) -> Note:
    try:
        return TypeAdapter(Note).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("unreadable note of the last plan ignored", path=str(path), error=str(error))
        return Note()
