"""How old tokens may be: the step of the version that made them, against the step that would train them.

Counting tickets in flight bounds the lag of the usual group, not of a straggler: with durations as they are in life, a
bound of 4 on the count gave a worst lag of 65. So each group is looked at when it comes, and `lag.stale` says what
happens past the limit:

    keep   trained all the same, corrected; past a generous hard limit the group is dropped
    mask   tokens past the limit get no loss, the younger ones of the sample do; a group of old ones alone is dropped
    wait   no step is made that would put a ticket past the limit (`groups.plan`); what is past it even so is dropped
    drop   the group is dropped: the plainest, and the one that costs the most long answers

Headers name versions only; the learner knows the step of each that it published, as far back as the limit reaches.
What it does not know is of an abandoned lineage, or was on its way when the checkpoint that it goes on from was made.
It ages as the last known version before it, from where that lineage was left: so none outlives the limit, and some go
a step early. The off-policy correction copes with the rest, and their tokens are counted. In the bodies, spans carry
their step.
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
        self._steps = dict(sorted(known))  # by version, in the order of publication

    def note(self, version: int, step: int) -> None:
        """A version was published, with the weights after so many optimizer steps."""
        assert version > max(self._steps, default=0), "versions only grow"
        self._steps[version] = step
        horizon = step - max(self._limit, self.max_steps)
        past = [v for v, s in self._steps.items() if s < horizon]
        for forgotten in past[:-1]:  # the newest of them stays: all that are older are past the limit with it
            del self._steps[forgotten]

    def is_stale(self, min_version: int, max_version: int, step: int) -> bool:
        """Whether a group whose tokens are of these versions, and of some between, is too old for this step."""
        judged = max_version if self.stale == "mask" else min_version
        if judged == 0 or not self._steps:  # no tokens at all, or nothing published to be older than
            return False
        if judged > max(self._steps):  # it is out, and was not noted yet
            return False
        # One before the oldest that is remembered is forgotten, or of an abandoned lineage.
        made_at = self._steps[max((v for v in self._steps if v <= judged), default=min(self._steps))]
        return step - made_at > self._limit

    def batches_ahead(self, step: int) -> int:
        """How many batches may be outstanding before this step is made."""
        if self.stale != "wait":
            return self.max_steps + 1
        # So many steps can still be made before tokens of the newest version are too old, this one included.
        return max(0, self.max_steps + 1 - (step - self._newest_step))

    def first_version(self) -> tuple[int, int]:
        """(version, its step) that a worker must have before it begins a new ticket: older ones would be too old at
        once. With a window of 0 steps it is the newest, and training is on-policy.

        It is of the newest term. Behind older ones lie versions of the steps that were lost with their learner: their
        numbers are higher than those of the steps that were kept, and workers may still have them."""
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
    """Tokens of versions before this step get no loss in the batch that makes `step + 1` of `step`."""
    return step - settings.max_steps if settings.stale == "mask" else 0
