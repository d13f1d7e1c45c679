"""Bookkeeping of every training ticket's outcome, and its part of a checkpoint.

Ticket numbers count up from 0, and each ticket ends exactly once: trained, dropped for a reason, or dead. A ticket that
is issued and not resolved is outstanding. Resolved ones are kept as ranges, since tickets end nearly in order: the
first range is the low watermark, the others are the exceptions above it, and the cost per ticket stays flat however
long the run. Endings are kept here until a commit writes them to the journal (learner.checkpoints.journal).

Which place in the data a number stands for follows from the retries so far (`numbering`). Pure bookkeeping: no Redis,
no disk, no blocking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from streamrl.learner.groups.numbering import NumberSet, Retries
from streamrl.protocol.transport.types import START, Letter, entry_order

TRAINED = "trained"
DEAD = "dead"
DROPPED = "dropped/"  # followed by the reason
NOT_RECORDED = f"{DROPPED}not_recorded"  # of a replay's tickets that have no answer in the recording
_ERROR_CHARS = 300  # of a dead ticket's error, kept in checkpoints until it is retried or purged


class Ending(NamedTuple):
    """How and when a ticket ended."""

    step: int  # the optimizer step in progress, counting from 1
    outcome: str  # trained, dead, or dropped/<reason>
    ticket: int
    asked: str = ""  # its identity (wire.ticket); empty if never issued, as for tickets that ended before a fork
    answered: str = ""  # identity of the group that ended it; empty if no group did


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The ledger's part of a checkpoint."""

    issued: int = 0
    watermark: int = 0  # every ticket below is resolved
    exceptions: tuple[tuple[int, int], ...] = ()  # resolved ranges [start, end) above the watermark
    outcomes: Mapping[str, int] = field(default_factory=dict)  # number of tickets by outcome
    ignored: Mapping[str, int] = field(default_factory=dict)  # messages that resolved no ticket, by reason
    attempts: Mapping[int, int] = field(default_factory=dict)  # failures so far of unresolved tickets
    begins: Mapping[int, int] = field(default_factory=dict)  # minimum weights' step of each unresolved ticket
    asked: Mapping[int, str] = field(default_factory=dict)  # identities of unresolved tickets
    retries: Mapping[int, int] = field(default_factory=dict)  # all so far: number -> the dead ticket
    letters: Mapping[int, Letter] | None = None  # dead tickets neither retried nor purged; None: not recorded yet

    @property
    def num_resolved(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumState:
    """The part of a checkpoint that holds a curriculum's draws and knowledge (learner.groups.curriculum)."""

    num_drawn: int = 0  # places with an assigned prompt
    num_visited: int = 0  # candidates considered for them
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # (pass, row) of those that may still be issued
    prompts: str = ""  # packed pool of drawn prompts (learner.groups.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedState:
    """The learner's position in the stream, as a checkpoint commits it."""

    cursor: str = START  # id of the last entry read
    carry: tuple[str, ...] = ()  # ids up to the cursor that are read but not resolved
    ledger: LedgerState = field(default_factory=LedgerState)
    versions: tuple[tuple[int, int], ...] = ()  # (version, step) as far back as the lag rule needs
    lengths: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # (ended, dropped) (learner.groups.counts)
    datasets: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # (trained, dropped) (learner.groups.counts)
    curriculum: CurriculumState | None = None  # None: tickets follow the data's order
    journal: str | None = None  # newest journal file
    uncommitted: tuple[Ending, ...] = ()  # endings since that file, for the next file; not in the manifest

    @property
    def trim_below(self) -> str:
        """The smallest entry id still needed; everything below may be trimmed from the stream."""
        milliseconds, sequence = entry_order(self.cursor)
        return min((*self.carry, f"{milliseconds}-{sequence + 1}"), key=entry_order)

    def committed(self, journal: str) -> FeedState:
        """The same state, once this journal file holds the endings."""
        return replace(self, journal=journal, uncommitted=())

    def to_json(self) -> dict[str, Any]:
        fields = asdict(replace(self, uncommitted=()))
        del fields["uncommitted"]
        return fields


class Ledger:
    def __init__(self, state: LedgerState | None = None, uncommitted: Iterable[Ending] = ()) -> None:
        state = state or LedgerState()
        below = ((0, state.watermark),) if state.watermark else ()
        self._resolved = NumberSet((*below, *state.exceptions))
        self.issued = state.issued  # the next ticket's number
        self.outcomes = Counter(state.outcomes)
        self.ignored = Counter(state.ignored)
        self.retries = Retries(state.retries)
        self.letters = dict(state.letters or {})
        self.knows_letters = state.letters is not None or not state.outcomes.get(DEAD)
        self._attempts = dict(state.attempts)
        self._begins = dict(state.begins)
        self._asked = dict(state.asked)
        self._uncommitted = list(uncommitted)

    @property
    def outstanding(self) -> int:
        return self.issued - len(self._resolved)

    @property
    def num_answered(self) -> int:
        """Tickets that ended with an answer, trained or dropped; a replay counts the same as the recorded run."""
        return self.outcomes.total() - self.outcomes[DEAD] - self.outcomes[NOT_RECORDED]

    def is_open(self, number: int) -> bool:
        """Whether the ticket is issued and not resolved."""
        return 0 <= number < self.issued and number not in self._resolved

    def open_tickets(self) -> Iterator[int]:
        return self._resolved.gaps(self.issued)

    @property
    def uncommitted(self) -> tuple[Ending, ...]:
        """Endings since the last commit."""
        return tuple(self._uncommitted)

    def resolve(self, number: int, outcome: str, *, step: int, answered: str = "") -> None:
        """End the ticket during this optimizer step; `answered` is the identity of the group that ended it."""
        assert self.is_open(number), f"ticket {number} cannot end as {outcome}: it is not open"
        self._resolved.add(number)
        self._attempts.pop(number, None)
        self._begins.pop(number, None)
        self.outcomes[outcome] += 1
        self._uncommitted.append(Ending(step, outcome, number, self._asked.pop(number, ""), answered))

    def die(self, number: int, letter: Letter, *, step: int) -> None:
        identity = self._asked.get(number, "")
        self.resolve(number, DEAD, step=step)
        self.letters[number] = letter._replace(error=letter.error[:_ERROR_CHARS], identity=identity)

    def repeat(self, dead: int, *, by: int) -> None:
        """Make number `by` a retry of the dead ticket."""
        self.retries.add(by, dead)
        self.letters.pop(dead, None)

    def adopt_letters(self, numbers: Iterable[int]) -> None:
        """Recover the dead letters of a checkpoint that predates them: those in Redis whose tickets have ended."""
        if not self.knows_letters:
            known = {number for number in numbers if number in self._resolved} - set(self.retries.known().values())
            self.letters = dict.fromkeys(sorted(known), Letter("not recorded by an older version", 0.0))
            self.knows_letters = True

    def committed(self, state: LedgerState) -> None:
        """Forget the endings in this state; the journal holds them now."""
        num_written = len(self._uncommitted) - (len(self._resolved) - state.num_resolved)
        assert 0 <= num_written <= len(self._uncommitted), "a newer state has been committed already"
        del self._uncommitted[:num_written]

    def ignore(self, reason: str) -> None:
        self.ignored[reason] += 1

    def attempts(self, number: int) -> int:
        return self._attempts.get(number, 0)

    def begin(self, number: int, *, step: int, identity: str) -> None:
        """Record the identity of an issued ticket and the step of the oldest weights a worker may start it with."""
        self._begins[number] = step
        self._asked[number] = identity

    def confirm_identity(self, number: int, identity: str) -> bool:
        """Compare the open ticket's identity with this one; a recording's ticket takes that of its first answer."""
        assert self.is_open(number), f"ticket {number} has no identity: it is not open"
        return self._asked.setdefault(number, identity) == identity

    def first_weights_step(self, number: int) -> int:
        return self._begins[number]

    def failed(self, number: int) -> int:
        """Count one failure and return the number so far."""
        assert self.is_open(number), f"ticket {number} cannot fail: it is not open"
        self._attempts[number] = self.attempts(number) + 1
        return self._attempts[number]

    def dropped(self) -> Iterator[tuple[str, int]]:
        """(reason, number of tickets) of those dropped."""
        return ((key.removeprefix(DROPPED), count) for key, count in self.outcomes.items() if key.startswith(DROPPED))

    def state(self) -> LedgerState:
        ranges = self._resolved.ranges()
        starts_at_zero = bool(ranges) and ranges[0][0] == 0
        return LedgerState(
            issued=self.issued,
            watermark=ranges[0][1] if starts_at_zero else 0,
            exceptions=ranges[1:] if starts_at_zero else ranges,
            outcomes=dict(self.outcomes),
            ignored=dict(self.ignored),
            attempts=dict(self._attempts),
            begins=dict(self._begins),
            asked=dict(self._asked),
            retries=self.retries.known(),
            letters=dict(self.letters) if self.knows_letters else None,
        )
