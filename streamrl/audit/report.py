"""What an audit says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

WRONG = ("lost", "twice", "contradictory", "unproven")  # of these there may be none


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The fate of every training ticket of a run, as of its newest complete checkpoint.

    On a live run, what ended since that checkpoint has not been committed, and counts as outstanding: a crash would
    undo it. A ticket that Redis has lost, or was too full to take, counts as lost until the learner has issued it
    again.
    """

    run: str
    run_uid: str
    folder: str
    redis: str | None  # the server that was looked at; None: the folder alone was
    learner_is_live: bool  # somebody holds the run's lease
    epoch: int  # of the newest learner
    checkpoint: str | None  # None: no commit yet
    step: int  # optimizer steps made by then

    issued: int  # tickets 0 .. issued - 1
    trained: int
    dropped: Mapping[str, int]  # by reason
    dead: int
    outstanding: int  # not ended, and there; those of `waiting` and `delivered`, when Redis was looked at
    waiting: int  # outstanding tickets that wait for a worker, or are with one
    delivered: int  # outstanding tickets whose group waits for the learner

    lost: int  # ended nowhere in the surviving lineage, neither waiting nor delivered
    twice: int  # trained more than once in the surviving lineage
    contradictory: int  # ended more than once, otherwise
    unproven: int  # ended, the checkpoint says; the part of the journal that says how is damaged
    examples: Mapping[str, tuple[int, ...]]  # some ticket numbers of the four above, where there are any

    wasted_steps: int  # committed by a learner that had been replaced; uncommitted ones leave no trace
    wasted_tickets: int  # trained in those steps
    leftover_tickets: int  # stream entries whose ticket has ended; harmless
    leftover_groups: int  # stream entries that are read, or whose ticket has ended; harmless
    malformed: Mapping[str, int]  # stream entries that are not what they should be, by what is wrong
    dead_letters: int
    eval_tickets: int  # stream entries of evaluation, which is outside of the sums above
    eval_groups: int

    problems: tuple[str, ...]  # what contradicts itself in the folder
    unchecked: tuple[str, ...]  # what could not be looked at

    @property
    def balanced(self) -> bool:
        return self.issued == self.trained + sum(self.dropped.values()) + self.dead + self.outstanding

    @property
    def clean(self) -> bool:
        """Every ticket is accounted for, exactly once."""
        return self.balanced and not self.problems and not any(getattr(self, kind) for kind in WRONG)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "balanced": self.balanced, "clean": self.clean}
