"""A recording in place of Redis: the stream of a replay, and the state with which its feed begins.

    recording ─► ReplayStream ─► the same feed, plans, algorithm, checkpoints as in a live run

Groups come in their order of delivery, and the only clock is the arrival time of the last group read. So a replay
depends on the recording and the configuration alone. Tickets are discarded. Every rank opens the recording by itself.
Blocks on the disk only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from streamrl.errors import WireError
from streamrl.learner.groups.ledger import NOT_RECORDED, FeedState, Ledger, LedgerState
from streamrl.protocol.recording import Place, Recording, open_group, read_group
from streamrl.protocol.transport.types import Entry, Letter, Orders, PresentGroup, PresentTicket, entry_order
from streamrl.protocol.wire.ticket import Purpose, Ticket
from streamrl.telemetry.progress import Report

_LARGEST_GAP = 1000  # between the ticket numbers of retries


class _NoLetters:
    def put(self, letters: Iterable[tuple[Ticket, Letter]], *, wait_for_room: bool = True) -> bool:
        return True

    def present(self) -> Sequence[PresentGroup]:
        return ()

    def purged(self) -> Set[int]:
        return frozenset()

    def remove(self, entry_ids: Sequence[str], *, requests: Sequence[int] = ()) -> None: ...


class ReplayStream:
    """A `GroupStream` that reads groups from the recording and discards what is written to it."""

    disturbed = False

    def __init__(self, recording: Recording) -> None:
        self._places = recording.places
        self._orders = [entry_order(place.entry_id) for place in self._places]
        self._by_id = {place.entry_id: place for place in self._places}
        self.letters = _NoLetters()
        self._files: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()
        self.now_s = self._orders[0][0] / 1000 if self._orders else 0.0
        self.used_up = False  # a read found no more groups

    def close(self) -> None:
        self._stack.close()

    # Groups in

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        if purpose == "eval":
            return []
        first = bisect_right(self._orders, entry_order(after))
        entries = [self._read(place) for place in self._places[first : first + count]]
        if entries:
            self.now_s = entry_order(entries[-1].id)[0] / 1000
        self.used_up = not entries
        return entries

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]:
        return [self._read(self._by_id[entry_id]) if entry_id in self._by_id else None for entry_id in ids]

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        first = bisect_right(self._orders, entry_order(after))
        return [
            PresentGroup(
                entry_id=place.entry_id, number=place.number, identity=place.identity, num_bytes=place.num_bytes
            )
            for place in self._places[first:]
        ]

    def orders(self) -> Orders:
        """ "stop" once the recording is used up."""
        return Orders(control="stop" if self.used_up else "run")

    # What a live stream would keep

    def restore(self, *, cursor: str, retried: Mapping[int, int | None] | None = None) -> None: ...

    def issue(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        return []

    def count_issued(self, issued: int) -> None: ...

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None: ...

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None: ...

    def trim_eval(self, *, below: str) -> None: ...

    def has_manifests(self, versions: Sequence[int]) -> bool:
        return True

    def event(self, kind: str, **detail: str | int | float) -> None: ...

    def record(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def reports(self) -> tuple[float, Sequence[Report]]:
        return self.now_s, ()

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        return []

    def waiting(self, purpose: Purpose) -> set[tuple[int, str]]:
        return set()

    def retried(self) -> Mapping[int, int]:
        return {}

    def _read(self, place: Place) -> Entry:
        file = self._files.get(place.path)
        if file is None:
            file = self._files[place.path] = self._stack.enter_context(place.path.open("rb"))
        return read_group(file, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroups:
    """What a recording's groups tell of the run."""

    numbers: Set[int]  # of the tickets that workers have answered, or failed to
    answered: Set[int]  # those among them that were answered at last
    versions: tuple[tuple[int, int], ...]  # (version, step) of every version that made a token, in order


def survey_groups(recording: Recording) -> RecordedGroups:
    """Read every group. DataError if one is damaged."""
    steps: dict[int, int] = {}
    answered: set[int] = set()
    for entry in recording.entries():
        try:
            group = open_group(entry)
        except WireError:
            answered.add(entry.number)  # the feed counts it
            continue
        if not group.header.failed:
            answered.add(entry.number)
        for sample in group.samples:
            for span in sample.spans:
                steps.setdefault(span.version, span.step)
    return RecordedGroups(numbers=recording.numbers(), answered=answered, versions=tuple(sorted(steps.items())))


def first_state(recorded: RecordedGroups, *, num_of_data: int) -> FeedState:
    """The feed's initial state: every recorded ticket counts as issued.

    Unanswered tickets among them end at once, counted as dropped, also those that only failed: a replay ignores
    failures, which came before it. Tickets beyond them are issued as in a live run but get no answer.
    """
    ledger = Ledger(LedgerState(issued=_num_issued(recorded.numbers, num_of_data)))
    for number in [number for number in ledger.open_tickets() if number not in recorded.answered]:
        ledger.resolve(number, NOT_RECORDED, step=0)
    return FeedState(ledger=ledger.state(), versions=recorded.versions, uncommitted=ledger.uncommitted)


def _num_issued(numbers: Iterable[int], num_of_data: int) -> int:
    """One more than the highest plausible ticket, retries beyond the data included; forged high numbers are ignored."""
    issued = 0
    for number in sorted(numbers):
        if number >= num_of_data and number - max(issued, num_of_data) > _LARGEST_GAP:
            break
        issued = number + 1
    return issued
