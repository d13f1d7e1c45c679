"""Tickets out: how many may be in flight, and what happens to one that failed.

Tickets are issued in order while fewer than `(lag.max_steps + 1) * groups_per_step` are outstanding. That bound
keeps generation from running ahead of training, and memory in Redis finite. A ticket whose workers reported a failure
is issued again, with its number of failures, until `worker.max_attempts`; then it goes to the dead letters.

The ledger counts a ticket as issued before it is written: should the write be lost, the ticket is outstanding and
missing, which reconciling mends; the other way round it might be issued twice. Blocks on single commands to Redis.
"""

from __future__ import annotations

from collections.abc import Iterable

from learner.data import PromptSet
from learner.lag import LagRule
from learner.ledger import DEAD, Ledger
from streamrl.config import schema
from streamrl.transport.seam import GroupStream
from streamrl.wire.ticket import Ticket


class Dispatch:
    def __init__(
        self,
        *,
        stream: GroupStream,
        prompts: PromptSet,
        ledger: Ledger,
        lag: LagRule,
        config: schema.Config,
        run_uid: str,
    ) -> None:
        self._stream = stream
        self._prompts = prompts
        self._ledger = ledger
        self._lag = lag
        self._run_uid = run_uid
        self._num_samples = config.sampling.num_samples
        self._max_attempts = config.worker.max_attempts
        self.num_tickets = prompts.num_tickets(config.training.max_epochs)
        self.window = (config.lag.max_steps + 1) * config.training.groups_per_step

    @property
    def exhausted(self) -> bool:
        """Every ticket of the run has been issued."""
        return self._ledger.issued >= self.num_tickets

    def top_up(self, *, step: int) -> bool:
        """Issue as many new tickets as the window has room for; whether there were any."""
        first = self._ledger.issued
        end = min(first + self.window - self._ledger.outstanding, self.num_tickets)
        if end <= first:
            return False
        self._ledger.issued = end
        self.issue(range(first, end), step=step)
        return True

    def issue(self, numbers: Iterable[int], *, step: int) -> None:
        """Write these tickets, for the first time or again."""
        tickets = [self._ticket(number, step) for number in numbers]
        if tickets:
            self._stream.issue(tickets)

    def failed(self, number: int, *, error: str, step: int) -> None:
        """A worker reported that it could not fill this ticket."""
        if self._ledger.failed(number) < self._max_attempts:
            self.issue([number], step=step)
        else:
            self._stream.dead(self._ticket(number, step), error=error)
            self._ledger.resolve(number, DEAD, step=step + 1)

    def _ticket(self, number: int, step: int) -> Ticket:
        data_epoch, prompt_index = self._prompts.locate(number)
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
            min_version=self._lag.oldest_to_begin_with(),
        )
