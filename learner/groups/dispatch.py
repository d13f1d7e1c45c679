"""Issues tickets: how many may be in flight, and what follows a failure.

Tickets are issued in order while there is room: fewer than `(lag.max_steps + 1) * groups_per_step` outstanding (with
`lag.stale: wait` fewer still while weights are old), and fewer bytes in Redis than `redis.max_backlog_bytes`, including
the expected bytes of outstanding groups. So generation does not run ahead of training, and memory in Redis is bounded.
Dead tickets that the operator wants retried go first, under new numbers.

A ticket that failed is issued again with its number of failures, until `worker.max_attempts`; then it becomes a dead
letter. The ledger counts a ticket as issued before it is written: if the write is lost, the ticket is outstanding and
missing, and reconciling (`reconcile`) repairs that; in the reverse order it might be issued twice.

Tickets that a full server refuses are kept here and offered again; meanwhile the groups that are ready are trained,
and a commit that frees memory is requested. Blocks on Redis, within its limits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import structlog

from streamrl.config import schema
from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.curriculum import PromptOrder
from streamrl.learner.groups.ledger import CurriculumState
from streamrl.learner.groups.plan import Books
from streamrl.learner.groups.tickets import Tickets
from streamrl.protocol.transport.types import GroupStream, Letter
from streamrl.protocol.wire.group import GroupHeader
from streamrl.recipe.algorithms import rewards_differ

log = structlog.get_logger(__name__)


class _Room(NamedTuple):
    num_tickets: int  # that may be issued; negative if the window has shrunk
    wants_commit: bool  # a commit would free bytes that are needed


class Dispatch:
    def __init__(
        self,
        *,
        stream: GroupStream,
        tickets: Tickets,
        order: PromptOrder,
        books: Books,
        config: schema.Config,
    ) -> None:
        self._stream, self._tickets, self._order = stream, tickets, order
        self._ledger, self._lag = books.ledger, books.lag
        self._ready_groups, self._backlog = books.ready_groups, books.backlog
        self._algorithm, self._max_attempts = config.algorithm, config.worker.max_attempts
        self._groups_per_step = config.training.groups_per_step
        self.retry_requests: list[int] = []  # dead tickets that the operator wants retried, as of the last orders
        self.refused: list[int] = []  # by a full server: issued in the ledger, written to Redis once there is room
        self.wants_commit = False  # a commit would free bytes that are needed

    @property
    def num_tickets(self) -> int:
        """Tickets of the whole run, including retries so far."""
        return self._tickets.num_of_data + len(self._ledger.retries)

    @property
    def exhausted(self) -> bool:
        """Whether every ticket of the run has been issued."""
        return self._ledger.issued >= self.num_tickets

    @property
    def num_on_the_way(self) -> int:
        """Tickets whose groups have not been read."""
        return max(0, self._num_out - self._ready_groups.num_read)

    @property
    def _num_out(self) -> int:
        """Outstanding tickets that are in Redis, not counting refused ones."""
        return self._ledger.outstanding - len(self.refused)

    def answered(self, header: GroupHeader) -> None:
        place = self._ledger.retries.place(header.ticket)
        if self._order.knows(place):
            # Whether or not it is trained: a recipe that keeps groups of equal rewards still learns nothing from them.
            self._order.ended(place, header, informative=rewards_differ(header, self._algorithm))

    def curriculum(self) -> CurriculumState | None:
        return self._order.state(self._ledger)

    def metrics(self) -> dict[str, float]:
        return self._order.metrics()

    def top_up(self, *, step: int) -> None:
        """Issue as many new tickets as there is room for; none while earlier ones are refused."""
        room, self.wants_commit = self._room(step)
        if room <= 0 or self.refused:
            return
        first = self._ledger.issued
        for dead in self._repeatable()[:room]:
            self.retry_requests.remove(dead)  # issuing fulfils the request
            self._ledger.repeat(dead, by=self._ledger.issued)
            self._ledger.issued += 1
            crashpoint("retry.counted")
        end, num_retries = min(first + room, self.num_tickets), len(self._ledger.retries)
        self._order.draw(end - num_retries)
        self._ledger.issued = max(self._ledger.issued, min(end, self._order.num_drawn + num_retries))
        crashpoint("issue.counted")
        self.issue(range(first, self._ledger.issued), step=step)

    def issue(self, numbers: Iterable[int] = (), *, step: int) -> None:
        """Write these tickets, new or repeated, after those that were refused before."""
        first_version, first_step = self._lag.first_version()
        before, self.refused = self.refused, []  # if this fails, reconciling finds what is missing
        wanted = dict.fromkeys((*filter(self._ledger.is_open, before), *numbers))
        tickets = self._tickets.make(wanted, step=step, min_version=first_version)
        for ticket in tickets:
            self._ledger.begin(ticket.number, step=first_step, identity=ticket.identity)
        if tickets:
            self.refused = [ticket.number for ticket in self._stream.issue(tickets)]
        if self.refused and not before:
            log.warning("Redis is full: tickets wait for room", tickets=len(self.refused))
        elif before and not self.refused:
            log.info("Redis accepts tickets again", tickets=len(tickets))

    def failed(self, number: int, *, error: str, step: int) -> None:
        """A worker could not fill this ticket, or could not read it: issue it again or declare it dead."""
        if self._ledger.failed(number) < self._max_attempts:
            self.issue([number], step=step)
        else:
            version, _ = self._lag.first_version()
            tickets = self._tickets.make([number], step=step, min_version=version)
            letter = Letter(error, time.time())
            self._ledger.die(number, letter, step=step + 1)
            self._stream.letters.put([(ticket, letter) for ticket in tickets])

    def _room(self, step: int) -> _Room:
        window = self._lag.batches_ahead(step) * self._groups_per_step - self._num_out
        in_bytes = 0 if self.refused else self._backlog.room(self.num_on_the_way)
        freeable = self._backlog.freeable(self._ready_groups.all_ids()) if in_bytes < window else 0
        lacking = self._groups_per_step - self._num_out  # needed for a single batch
        # An early commit must pay off: by freeing half the budget, or room for the next batch.
        wants_commit = 2 * freeable >= self._backlog.max_bytes or (freeable > 0 and in_bytes < lacking)
        if freeable == 0:
            in_bytes = max(in_bytes, lacking)  # or a budget too small for one batch would block forever
        return _Room(min(window, in_bytes), wants_commit)

    def _repeatable(self) -> list[int]:
        """Dead tickets to retry; one that a lost step made open again must die first."""
        return [dead for dead in self.retry_requests if dead in self._ledger.letters]
