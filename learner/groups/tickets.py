"""Tickets by number: which prompt each number stands for, and the ticket that carries it.

A number stands for a place in the data, given the retries so far; the order of prompts says which prompt is there. A
replay may not know all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.config import schema
from streamrl.learner.groups.curriculum import PromptOrder
from streamrl.learner.groups.ledger import Ledger
from streamrl.learner.groups.numbering import Retries
from streamrl.learner.groups.prompts import Prompt, PromptSet
from streamrl.protocol.wire.ticket import Ticket


class Tickets:
    def __init__(
        self, *, prompts: PromptSet, order: PromptOrder, ledger: Ledger, config: schema.Config, run_uid: str
    ) -> None:
        self._prompts, self._order, self._ledger, self._run_uid = prompts, order, ledger, run_uid
        self._num_samples = config.sampling.num_samples
        self.num_of_data = prompts.num_places(config.training.max_epochs)  # tickets of the whole run, without retries

    def prompt_of(self, number: int) -> Prompt | None:
        """The ticket's prompt; None if a replay does not know it."""
        place = self._ledger.retries.place(number)
        return self._prompts.rows[self._order.locate(place)[1]] if self._order.knows(place) else None

    def dataset_of(self, number: int) -> str:
        prompt = self.prompt_of(number)
        return "" if prompt is None else prompt.dataset

    def make(self, numbers: Iterable[int], *, step: int, min_version: int) -> list[Ticket]:
        """Tickets for the numbers whose prompt is known; a replay may not know all."""
        retries = self._ledger.retries
        known = (number for number in numbers if self._order.knows(retries.place(number)))
        return [self._make_one(number, retries, step=step, min_version=min_version) for number in known]

    def identity(self, number: int, retries: Retries) -> str:
        """The identity of the ticket that the number stands for, given these retries."""
        return self._make_one(number, retries).identity

    def _make_one(self, number: int, retries: Retries, *, step: int = 0, min_version: int = 0) -> Ticket:
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
