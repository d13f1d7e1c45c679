"""The staleness rule: the step of the version that made a token, against the step that would train it.

Limiting the tickets in flight bounds the lag of a typical group, not of a straggler: with realistic durations, a bound
of 4 on the count gave a worst lag of 65. So each group is checked when it arrives, and `lag.stale` decides what happens
past the limit:

    keep   trained with off-policy correction; past a generous hard limit the group is dropped
    mask   tokens past the limit get no loss, newer ones of the sample do; a group of stale tokens only is dropped
    wait   no step is made that would put a ticket past the limit (`groups.plan`); what is past it anyway is dropped
    drop   the group is dropped: the simplest, and the one that loses the most long answers

Headers name versions only; the learner knows the step of each version that it published, as far back as the limit
reaches. An unknown version is of an abandoned lineage, or was in flight when the checkpoint that the learner resumes
from was made. It counts as old as the last known version before it, so none outlives the limit, and some are dropped a
step early. The off-policy correction handles the rest, and their tokens are counted. In bodies, spans carry their step.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.config import schema
from streamrl.versions import term_of


class LagRule:
    def __init__(self, settings: schema.Lag, known: Iterable[tuple[int, int]] = ()) -> None:
        self.max_steps = settings.max_steps
        self.stale = settings.stale
        self._limit = settings.hard_limit_steps if settings.stale == "keep" else settings.max_steps
        self._steps = dict(sorted(known))  # version -> step, in the order of publication

    def note(self, version: int, step: int) -> None:
        """Note a published version and its optimizer step."""
        assert version > max(self._steps, default=0), "versions only grow"
        self._steps[version] = step
        horizon = step - max(self._limit, self.max_steps)
        past = [v for v, s in self._steps.items() if s < horizon]
        for forgotten in past[:-1]:  # the newest of them stays: everything older is past the limit with it
            del self._steps[forgotten]

    def is_stale(self, min_version: int, max_version: int, step: int) -> bool:
        """Whether a group with tokens of versions from `min_version` to `max_version` is too old for this step."""
        judged = max_version if self.stale == "mask" else min_version
        if judged == 0 or not self._steps:  # no tokens, or nothing published yet
            return False
        made_at = self._steps.get(judged)
        if made_at is None:
            if judged > max(self._steps):  # published, and not noted yet
                return False
            # A version before the oldest known one is forgotten, or of an abandoned lineage.
            made_at = self._steps[max((v for v in self._steps if v <= judged), default=min(self._steps))]
        return step - made_at > self._limit

    def batches_ahead(self, step: int) -> int:
        """How many batches may be outstanding before this step is made."""
        if self.stale != "wait":
            return self.max_steps + 1
        # The steps, this one included, that can be made before tokens of the newest version are stale.
        return max(0, self.max_steps + 1 - (step - self._newest_step))

    def first_version(self) -> tuple[int, int]:
        """The oldest (version, step) with which a worker may begin a new ticket.

        Anything older would be stale at once. With a window of 0 steps it is the newest, and training is on-policy. It
        is of the newest term: an older term may have published versions for steps that were lost with its learner.
        Their numbers are higher than those of the steps that were kept, and workers may still hold them.
        """
        window = 0 if self.stale == "wait" else self.max_steps
        term = term_of(max(self._steps, default=0))
        young = ((v, s) for v, s in self._steps.items() if term_of(v) == term and self._newest_step - s <= window)
        return min(young, default=(0, 0))

    def known(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._steps.items())

    @property
    def _newest_step(self) -> int:
        return max(self._steps.values(), default=0)


def oldest_trained_step(settings: schema.Lag, step: int) -> int:
    """Tokens of versions before this step get no loss in the batch that advances `step` to `step + 1`."""
    return step - settings.max_steps if settings.stale == "mask" else 0
