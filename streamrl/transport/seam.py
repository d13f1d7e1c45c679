"""The seam between the stream and the learner's feed: what tickets and groups look like from rank 0.

`transport.learner.LearnerStream` is it on Redis, `transport.double.LearnerStreamDouble` in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from streamrl.transport.types import Entry, Orders, PresentGroup, PresentTicket
from streamrl.wire.ticket import Purpose, Ticket


class GroupStream(Protocol):
    """Tickets out, groups in. Every method that writes raises Fenced once a newer learner has taken over."""

    @property
    def disturbed(self) -> bool:
        """The server was away, replaced or emptied since the last `restore`: something may be missing."""
        ...

    def restore(self, *, cursor: str, retried: Mapping[int, int] | None = None) -> None:
        """Make the streams exist, let no new group land at or behind the cursor, and note which tickets repeat which
        dead ones."""
        ...

    def orders(self) -> Orders:
        """The operator's."""
        ...

    def issue(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """A ticket with `retry_of` also ends the request for it, and is noted among the retried: all in one step.
        Returns those for which the server has no room, so that they are not written."""
        ...

    def count_issued(self, issued: int) -> None:
        """The number of the next training ticket, for whoever audits: `issue` carries it on."""
        ...

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        """Groups after this id in the stream's order; waits for the first one at most so long, 0: not at all."""
        ...

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]: ...

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        """The checkpoint of this step is there: remove training groups with ids smaller than `trim_below`, and those
        that have ended among the others."""
        ...

    def present_tickets(self, purpose: Purpose) -> list[PresentTicket]:
        """What nobody has delivered, in the stream's order."""
        ...

    def present_groups(self, purpose: Purpose, *, after: str) -> list[PresentGroup]:
        """The groups after this id."""
        ...

    def delete_tickets(self, purpose: Purpose, entry_ids: Sequence[str]) -> None: ...

    def dead(self, ticket: Ticket, *, error: str) -> None:
        """Put the ticket among the dead letters."""
        ...

    def retried(self) -> Mapping[int, int]:
        """By the number of a ticket that repeats a dead one, the dead one's, as far as the server knows."""
        ...

    def trim_eval(self, *, below: str) -> None:
        """Remove evaluation groups with smaller ids."""
        ...
