"""The fate of each ticket, as arrays over ticket numbers.

    ended in the journal                     trained, dropped or dead; more than once: twice, or contradictory;
                                             by a group that answers something else than was asked: misanswered
    otherwise, ended in the checkpoint       lost, for nobody will ask again; unproven, if the journal is damaged
    otherwise among the tickets, or the groups
         beyond the cursor or in carry       outstanding
    otherwise                                lost

Pure: neither disk nor Redis.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from streamrl.ops.audit.commit import LastCommit
from streamrl.ops.audit.journal import TRAINED, Chain
from streamrl.ops.audit.streams import Streams

DEAD = "dead"
DROPPED = "dropped/"  # followed by the reason

Mask = npt.NDArray[np.bool_]  # [issued]
Counts = npt.NDArray[np.int32]  # [issued]


class AuditBooks:
    """Every ticket is in exactly one of `trained`, `dropped`, `dead`, `outstanding`, `lost` and `unproven`. If Redis
    was read, outstanding ones are `waiting` or `delivered`. Those in `twice`, `contradictory` and `misanswered` are
    also in one of these.
    """

    def __init__(self, commit: LastCommit, chain: Chain, streams: Streams) -> None:
        self._commit, self._chain, self._streams = commit, chain, streams
        unread = [(n, identity) for at, n, identity in streams.groups if at > commit.cursor or at in commit.carry]
        self._queued, self._pending = (self._own_numbers(entries) for entries in (streams.tickets, unread))
        self._mismatched = {
            "tickets/not_asked": len(streams.tickets) - len(self._queued),
            "groups/not_asked": len(unread) - len(self._pending),
        }
        if streams.issued is not None:
            self.issued = max(commit.issued, streams.issued)
        else:
            self.issued = _guess_issued(commit.issued, (*self._queued, *self._pending), window=streams.window)
        self._ended: Counts = np.zeros(self.issued, np.int32)  # times that it ended
        self.misanswered: Mask = self._mask((n, n + 1) for line in chain.lines for n in line.misanswered)
        trained: Counts = np.zeros(self.issued, np.int32)  # times that it was trained
        by_outcome: dict[str, Mask] = defaultdict(lambda: self._mask(()))
        for line in chain.lines:
            mask = by_outcome[line.outcome]
            for start, end in line.ranges:
                mask[start:end] = True
                self._ended[start:end] += 1
                trained[start:end] += line.outcome == TRAINED
        self.trained: Mask = trained > 0
        self.twice: Mask = trained > 1
        self.contradictory: Mask = (self._ended > 1) & ~self.twice
        # A ticket that was also trained counts only as trained.
        ended_as = {outcome: mask & ~self.trained for outcome, mask in sorted(by_outcome.items())}
        self.dead: Mask = ended_as.get(DEAD, self._mask(()))
        self.dropped: Mapping[str, Mask] = {  # by reason
            outcome.removeprefix(DROPPED): mask for outcome, mask in ended_as.items() if outcome.startswith(DROPPED)
        }
        self._resolved = self._mask(commit.resolved)
        is_queued = self._mask((number, number + 1) for number in self._queued)
        is_pending = self._mask((number, number + 1) for number in self._pending)
        self._open: Mask = (self._ended == 0) & ~self._resolved
        self.waiting: Mask = self._open & is_queued
        self.delivered: Mask = self._open & is_pending & ~is_queued
        self.outstanding: Mask = self.waiting | self.delivered if streams.server is not None else self._open
        missing = self._open & ~self.outstanding
        unjournaled = (self._ended == 0) & self._resolved
        self.lost: Mask = missing if chain.breaks else missing | unjournaled
        self.unproven: Mask = unjournaled if chain.breaks else np.zeros_like(unjournaled)

    def disagreements(self) -> list[str]:
        """Return contradictions between the journal and the ledger in the checkpoint."""
        found: list[str] = []
        journaled = Counter[str]()
        never_issued = 0
        for line in self._chain.lines:
            journaled[line.outcome] += line.num_tickets
            never_issued += sum(max(0, end - max(start, self._commit.issued)) for start, end in line.ranges)
        if never_issued:
            found.append(f"the journal records the end of {never_issued} tickets that the checkpoint has not issued")
        if still_open := int(((self._ended > 0) & ~self._resolved)[: self._commit.issued].sum()):
            found.append(f"{still_open} tickets have ended in the journal, but are open in the checkpoint")
        if not self._chain.breaks and journaled != Counter(self._commit.outcomes):
            found.append(f"the journal counts {_show(journaled)}, the checkpoint {_show(self._commit.outcomes)}")
        return found

    # Stream entries without effect

    @property
    def num_leftover_tickets(self) -> int:
        return self._num_ended(self._queued)

    @property
    def num_leftover_groups(self) -> int:
        num_read = len(self._streams.groups) - len(self._pending) - self._mismatched["groups/not_asked"]
        return num_read + self._num_ended(self._pending)

    def foreign_entries(self) -> Mapping[str, int]:
        """Count entries about tickets that do not exist, or that ask for something else."""
        first = self.issued + self._streams.issued_since
        entries = {"tickets/never_issued": self._queued, "groups/never_issued": self._pending}
        found = {name: sum(number >= first for number in numbers) for name, numbers in entries.items()}
        return {name: count for name, count in (found | self._mismatched).items() if count}

    def _own_numbers(self, entries: Iterable[tuple[int, str]]) -> list[int]:
        """Return the ticket numbers, except those under which the newest commit asked for something else; it does not
        know tickets issued since."""
        identities = self._commit.identities
        return [number for number, identity in entries if identities.get(number, identity) == identity]

    def _num_ended(self, numbers: Iterable[int]) -> int:
        return sum(not self._open[number] for number in numbers if number < self.issued)

    def _mask(self, ranges: Iterable[tuple[int, int]]) -> Mask:
        mask = np.zeros(self.issued, np.bool_)
        for start, end in ranges:
            mask[start:end] = True
        return mask


def _guess_issued(counter: int, present: Iterable[int], *, window: int) -> int:
    """Guess the next ticket number if no learner has recorded it: the checkpoint's counter, or what the streams show
    beyond it. Issued tickets are still there, apart from lost ones, so numbers beyond a gap wider than the window of
    outstanding tickets were never issued, but forged."""
    for number in sorted(number for number in present if number >= counter):
        if number - counter > window:
            break
        counter = number + 1
    return counter


def _show(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()) if count) or "none"
