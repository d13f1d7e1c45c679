"""Stops the run when only failures arrive, which no single prompt can cause.

A reward that always raises, or an engine that refuses everything, would turn all data into dead letters, and the run
would end as if it had trained. Failures that were in the stream before this learner started do not count: the cause may
have been fixed since.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.errors import TrainingError
from streamrl.learner.groups.ledger import DEAD, TRAINED, Ledger
from streamrl.learner.groups.prompts import Prompt
from streamrl.protocol.transport.types import START, entry_order

_SHOWN_CHARS = 80  # of a prompt


class FailuresInRow:
    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0
        self._newest_existing: str | None = None  # newest entry in the stream when this learner started
        self.latest = ""  # the latest failure: prompt and error

    def note_existing(self, entry_ids: Iterable[str]) -> None:
        """Note the entries in the stream; only the first call counts."""
        if self._newest_existing is None:
            self._newest_existing = max(entry_ids, key=entry_order, default=START)

    def is_old(self, entry_id: str) -> bool:
        return self._newest_existing is not None and entry_order(entry_id) <= entry_order(self._newest_existing)

    def sound(self) -> None:
        """Note a group without a failure."""
        self._count = 0

    def failed(self, prompt: Prompt | None, *, error: str) -> None:
        """Count a failure. `prompt` is None in a replay that does not know it."""
        self._count += 1
        self.latest = f"{self._describe(prompt)}: {error}"
        if self._count >= self._limit:
            raise TrainingError(
                f"{self._count} groups in a row failed (training.max_failed_in_row). The latest, {self.latest}. "
                "Fix the cause and start the run again: it resumes from its last checkpoint"
            )

    def check_trained(self, ledger: Ledger) -> None:
        if ledger.outcomes[TRAINED]:
            return
        endings = [f"{count} dropped as {reason}" for reason, count in ledger.dropped()]
        if num_dead := ledger.outcomes[DEAD]:
            endings.append(f"{num_dead} failed for good (the latest, {self.latest})")
        raise TrainingError(
            f"the data is used up and no step was made: of {ledger.issued} groups {'; '.join(endings)}. "
            "`streamrl groups` shows answers and their rewards; fix the cause and start the run again"
        )

    @staticmethod
    def _describe(prompt: Prompt | None) -> str:
        if prompt is None:
            return "a prompt"
        text = prompt.text if len(prompt.text) <= _SHOWN_CHARS else f"{prompt.text[:_SHOWN_CHARS]}..."
        return f"prompt {text!r} (line {prompt.line})"
