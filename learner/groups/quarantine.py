"""Which group kills the ranks: found by what they were at when they died, and quarantined.

A group may bring down whoever trains it: out of memory, a kernel that crashes. Restarted ranks read the same groups
again, so the run would die of it for ever. Therefore rank 0 notes the plan before each step, and takes the note away
after it:

    death in a step, once          as before: most deaths have nothing to do with groups
    twice, no step between         what both plans hold is suspected, and trained one group a step, suspects first
    three times                    the plan was of one suspect: it is dropped as "quarantined", its neighbours train
    a death between steps          no group's doing: somebody kills ranks, so it takes one more to convict, six at most

All may be chance all the same, when somebody kills ranks all the time; then a group is lost to training, counted and
noted in the journal like every other that is dropped. The note lies in the run's folder, one file a term, since a
learner that was replaced may still write its own. It is written aside and renamed, so it survives the process; it need
not survive the machine, whose death no group has caused, nor a full disk. Blocks on the disk only.
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
_MOST_ELSEWHERE = 3  # or a group that kills, beside somebody who does, would never be found

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What one learner leaves to the next. All but the counts of deaths are numbers of tickets."""

    plan: tuple[int, ...] = ()  # being trained; empty between steps
    deaths: int = 0  # in a row, with no step made between
    elsewhere: int = 0  # learners since the first of these that ended, or died, between steps
    suspects: tuple[int, ...] = ()  # in all the plans of these deaths
    quarantined: tuple[int, ...] = ()


class Quarantine:
    def __init__(self, root: Path | None = None, *, term: int = 0) -> None:
        """Begins with what the learner before this term has left in the run's folder. Without a folder nothing is
        noted, and so nobody suspected: a replay makes its steps as they were recorded, whoever dies."""
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
        """Whether its group is not to be trained any more."""
        return ticket in self._note.quarantined

    def narrow(self, batch: Sequence[int]) -> Sequence[int]:
        """Which tickets of this batch are to be trained now."""
        if not self._is_searching:
            return batch
        return [ticket for ticket in batch if ticket in self._note.suspects][:1] or batch

    def begin(self, batch: Sequence[int]) -> None:
        """These tickets are trained next: before the ranks hear of it."""
        self._note = replace(self._note, plan=tuple(batch))
        self._write()

    def survived(self) -> None:
        """The plan has done no harm."""
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
        aside = self._path.with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(asdict(self._note)))
            aside.rename(self._path)
        except OSError as error:
            log.warning("plan not noted", error=str(error))


def _after(note: Note) -> Note:
    """What follows for a learner that finds this note."""
    if not note.plan:
        return replace(note, elsewhere=min(note.elsewhere + 1, _MOST_ELSEWHERE) if note.deaths else 0)
    common = _common(note.plan, note.suspects)
    if not common:  # two plans that share nothing did not die of a group
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
        log.warning("note of the last plan ignored", path=str(path), error=str(error))
        return Note()
