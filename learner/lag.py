"""How old a group may be: the steps that its oldest version was made at, against the step that would train it.

Counting tickets in flight bounds the lag of the usual group, not of a straggler, so each group is looked at when it
comes. Headers name versions only; the learner knows the step of each that it published, as far back as the limit
reaches. Versions of an abandoned lineage, which it does not know, are let through: they cannot be measured by steps,
the off-policy correction copes with them, and their tokens are counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.config import schema


class LagRule:
    def __init__(self, settings: schema.Lag, known: Iterable[tuple[int, int]] = ()) -> None:
        self._limit = settings.max_steps if settings.stale == "drop" else settings.hard_limit_steps
        self._window = settings.max_steps
        self._steps = dict(sorted(known))  # by version, in the order of publication

    def note(self, version: int, step: int) -> None:
        """A version was published, with the weights after so many optimizer steps."""
        assert version > max(self._steps, default=0), "versions only grow"
        self._steps[version] = step
        horizon = step - max(self._limit, self._window)
        past = [v for v, s in self._steps.items() if s < horizon]
        for forgotten in past[:-1]:  # the newest of them stays: all that are older are past the limit with it
            del self._steps[forgotten]

    def is_stale(self, min_version: int, step: int) -> bool:
        """Whether a group whose oldest tokens are of this version is too old for this step."""
        if min_version == 0 or not self._steps:  # no tokens at all, or nothing published to be older than
            return False
        oldest = min(self._steps)
        if min_version < oldest:  # forgotten, or of an abandoned lineage
            min_version = oldest
        made_at = self._steps.get(min_version)
        return made_at is not None and step - made_at > self._limit

    def oldest_to_begin_with(self) -> int:
        """The version that a worker must have before it begins a new ticket: older ones would be too old at once.

        With a window of 0 steps it is the newest, and training is on-policy.
        """
        newest_step = max(self._steps.values(), default=0)
        return min((v for v, s in self._steps.items() if newest_step - s <= self._window), default=0)

    def known(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._steps.items())
