"""Issues tickets: how many may be in flight, which prompt each carries, and what follows a failure.

Tickets are issued in order while there is room: fewer than `(lag.max_steps + 1) * groups_per_step` outstanding (with
`lag.stale: wait` fewer still while weights are old), and fewer bytes in Redis than `redis.max_backlog_bytes`, including
the expected bytes of outstanding groups. So generation does not run ahead of training, and memory in Redis is bounded.
Dead tickets that the operator wants retried go first, under new numbers.

A ticket that failed is issued again with its number of failures, until `worker.max_attempts`; then it becomes a dead
letter. The ledger counts a ticket as issued before it is written: if the write is lost, the ticket is outstanding and
missing, and reconciling repairs that; in the reverse order it might be issued twice.

Tickets that a full server refuses are kept here and offered again; meanwhile the groups in hand are trained, and a
commit that frees memory is requested.

Reconciling repairs what Redis has lost or holds in excess: at the start, after every Redis failure, and now and then.
Blocks on Redis, within its limits.

    streams restored ─► inventory: tickets, then groups ─► superfluous tickets deleted ─► missing ones issued again
                                                           ─► dead letters likewise    ─► issued count to the audit

An entry with one of our ticket numbers counts only if it asks for what that number stands for: a Redis that lost and
regained its latest writes may hold another learner's tickets under the same numbers (`wire.ticket`).

The ledger, and with it the checkpoint, is the authority on dead letters. A ticket is dead before its letter is in
Redis; letters that Redis lost or kept too long are repaired by reconciling. Lost letters never stop a run: those that a
full server refuses are offered again at the next reconciling.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set

import structlog
from msgspec.structs import replace

from streamrl.config import schema
from streamrl.crashpoints import crashpoint
from streamrl.learner.groups.backlog import Backlog, Inventory
from streamrl.learner.groups.curriculum import PromptOrder
from streamrl.learner.groups.gate import NOT_ASKED
from streamrl.learner.groups.lag import LagRule
from streamrl.learner.groups.ledger import CurriculumState, Ledger, Retries
from streamrl.learner.groups.plan import ReadyGroups
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.protocol.transport.types import GroupStream, Letter
from streamrl.protocol.wire.group import GroupHeader
from streamrl.protocol.wire.ticket import Ticket
from streamrl.recipe.algorithms import rewards_differ

log = structlog.get_logger(__name__)


class Dispatch:
    def __init__(
        self,
        *,
        stream: GroupStream,
        prompts: PromptSet,
        order: PromptOrder,
        ledger: Ledger,
        lag: LagRule,
        ready_groups: ReadyGroups,
        backlog: Backlog,
        config: schema.Config,
        run_uid: str,
    ) -> None:
        self._stream, self._prompts, self._order, self._run_uid = stream, prompts, order, run_uid
        self._ledger, self._lag, self._ready_groups, self._backlog = ledger, lag, ready_groups, backlog
        self._num_samples, self._algorithm = config.sampling.num_samples, config.algorithm
        self._max_attempts = config.worker.max_attempts
        self._groups_per_step = config.training.groups_per_step
        self._num_of_data = prompts.num_places(config.training.max_epochs)
        self._widest_window = (config.lag.max_steps + 1) * self._groups_per_step
        self.retry_requests: list[int] = []  # dead tickets that the operator wants retried, as of the last orders
        self.refused: list[int] = []  # by a full server: issued in the ledger, written to Redis once there is room
        self._is_issued_known = False  # the issued count includes tickets issued after the checkpoint
        self.wants_commit = False  # a commit would free bytes that are needed

    @property
    def num_tickets(self) -> int:
        """Tickets of the whole run, including retries so far."""
        return self._num_of_data + len(self._ledger.retries)

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

    def prompt_of(self, number: int) -> Prompt | None:
        """The ticket's prompt; None if a replay does not know it."""
        place = self._ledger.retries.place(number)
        return self._prompts.rows[self._order.locate(place)[1]] if self._order.knows(place) else None

    def dataset_of(self, number: int) -> str:
        prompt = self.prompt_of(number)
        return "" if prompt is None else prompt.dataset

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
        room = self._room(step)
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
        tickets = self._tickets(wanted, step=step, min_version=first_version)
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
            tickets = self._tickets([number], step=step, min_version=version)
            letter = Letter(error, time.time())
            self._ledger.die(number, letter, step=step + 1)
            self._stream.letters.put([(ticket, letter) for ticket in tickets])

    def reconcile(self, *, cursor: str, step: int) -> Inventory:
        """Compare Redis with the ledger and repair the differences.

        Groups up to the cursor have been read. Unresolved ones are read again, since their bodies may be gone and the
        ranks still have to fetch them.
        """
        self._stream.restore(cursor=cursor, retried=self._retried())
        self._ready_groups.put_back()
        found = Inventory.take(self._stream)
        self._backlog.recount(found.groups, cursor=cursor)
        live_identities = found.live_identities(cursor=cursor, unread=self._ready_groups.unread)
        self._count_issued(live_identities, found.retried, step=step)
        present = {
            n for n, identity in live_identities if self._ledger.is_open(n) and self._ledger.has_identity(n, identity)
        }
        superfluous = found.superfluous(self._ledger)
        missing = [number for number in self._ledger.open_tickets() if number not in present]
        flaws = found.unreadable(self._ledger)
        unreadable = flaws.keys() & set(missing)
        for ticket in (of_another_lineage := found.of_another_lineage(self._ledger)):
            self._ledger.ignore(NOT_ASKED)
            log.warning("ticket of another lineage", entry=ticket.entry_id, ticket=ticket.number)
        if superfluous:
            self._stream.delete_tickets("train", superfluous)
            crashpoint("reconcile.deleted")
        self.issue((number for number in missing if number not in unreadable), step=step)
        self._repair_letters(found, step=step)
        for number in sorted(unreadable):
            self.failed(number, error=f"no worker could read the ticket: {flaws[number]}", step=step)
        self._stream.count_issued(self._ledger.issued)
        log.info(
            "reconciled",
            present=len(present),
            deleted=len(superfluous),
            of_another_lineage=len(of_another_lineage),
            issued_again=len(missing),
            unreadable=len(unreadable),
        )
        return found

    def _retried(self) -> dict[int, int | None]:
        """The retries that Redis should know: ours, and removals (None) of another lineage's below our issued count."""
        known = self._ledger.retries.known()
        others = {n: None for n in self._stream.retried() if n < self._ledger.issued and n not in known}
        return {**others, **known}

    def _count_issued(self, live_identities: Set[tuple[int, str]], retried: Mapping[int, int], *, step: int) -> None:
        """Raise the issued count past tickets that an earlier learner issued after the checkpoint. Runs once.

        Such tickets are still in Redis, except for what Redis has lost, so nothing beyond a gap of more than a window
        counts: a forged high number must not make us issue all those below it, and reissuing genuine tickets beyond a
        gap costs only their generation. A ticket whose content differs from what its number stands for, given these
        retries, does not count either: nothing after the checkpoint has ended, so these numbers may be reused.
        """
        if self._is_issued_known:
            return
        counter = first = self._ledger.issued
        repeated = {number: dead for number, dead in retried.items() if number >= first}
        retries = Retries({**self._ledger.retries.known(), **repeated})
        for number in sorted(number for number in {*(n for n, _ in live_identities), *repeated} if number >= first):
            too_far = number - counter > self._widest_window or retries.num_places(number + 1) > self._order.num_drawn
            if too_far or not self._order.knows(retries.place(number)):
                break
            if number in repeated or (number, self._ticket(number, retries).identity) in live_identities:
                counter = number + 1
        self._ledger.issued = counter
        for number in range(first, counter):
            if number in repeated:
                self._ledger.repeat(repeated[number], by=number)
            identity = self._ticket(number, self._ledger.retries).identity
            self._ledger.begin(number, step=step, identity=identity)  # with weights at least as new as the checkpoint's
        self._is_issued_known = True

    def _repair_letters(self, found: Inventory, *, step: int) -> None:
        ledger = self._ledger
        ledger.adopt_letters(letter.number for letter in found.letters)
        for number in found.purged:
            ledger.letters.pop(number, None)
        listed = found.listed(ledger)
        stale = sorted({letter.entry_id for letter in found.letters} - set(listed.values()))
        # A request stands while its ticket may still die: it had died in the lost steps that the request refers to.
        settled = [
            number for number in self.retry_requests if number not in ledger.letters and not ledger.is_open(number)
        ]
        if stale or settled:
            self._stream.letters.remove(stale, requests=settled)
        missing = [(number, letter) for number, letter in ledger.letters.items() if number not in listed]
        version, _ = self._lag.first_version()
        again = (
            (replace(ticket, attempt=self._max_attempts), letter)
            for number, letter in missing
            for ticket in self._tickets([number], step=step, min_version=version)
        )
        if not self._stream.letters.put(again, wait_for_room=False):
            log.warning("Redis is full: lost dead letters not restored", letters=len(missing))
        if stale or missing:
            log.info("dead letters repaired", letters=len(ledger.letters), removed=len(stale), put_back=len(missing))

    def _room(self, step: int) -> int:
        """How many tickets may be issued; negative if the window has shrunk."""
        window = self._lag.batches_ahead(step) * self._groups_per_step - self._num_out
        in_bytes = 0 if self.refused else self._backlog.room(self.num_on_the_way)
        freeable = self._backlog.freeable(self._ready_groups.all_ids()) if in_bytes < window else 0
        lacking = self._groups_per_step - self._num_out  # needed for a single batch
        # An early commit must pay off: by freeing half the budget, or room for the next batch.
        self.wants_commit = 2 * freeable >= self._backlog.max_bytes or (freeable > 0 and in_bytes < lacking)
        if freeable == 0:
            in_bytes = max(in_bytes, lacking)  # or a budget too small for one batch would block forever
        return min(window, in_bytes)

    def _repeatable(self) -> list[int]:
        """Dead tickets to retry; one that a lost step made open again must die first."""
        return [dead for dead in self.retry_requests if dead in self._ledger.letters]

    def _tickets(self, numbers: Iterable[int], *, step: int, min_version: int) -> list[Ticket]:
        """Tickets for the numbers whose prompt is known; a replay may not know all."""
        retries = self._ledger.retries
        known = (number for number in numbers if self._order.knows(retries.place(number)))
        return [self._ticket(number, retries, step=step, min_version=min_version) for number in known]

    def _ticket(self, number: int, retries: Retries, *, step: int = 0, min_version: int = 0) -> Ticket:
        """The ticket that the number stands for, given these retries."""
        data_epoch, prompt_index = self._order.locate(retries.place(number))
        prompt = self._prompts.rows[prompt_index]
        return Ticket(
            number=number,
            run_uid=self._run_uid,
            purpose="train",
            data_epoch=data_epoch,
            prompt_index=prompt_index,
            prompt=prompt.text,
            token_ids=prompt.token_ids,
            fields=prompt.fields,
            num_samples=self._num_samples,
            attempt=self._ledger.attempts(number),
            issued_step=step,
            min_version=min_version,
            retry_of=retries.dead_of(number),
        )
