"""The recent steps of a run: their pace, and what they have added to its counters. Pure.

Counters grow over the whole run. A cause derived from them alone would be shown for days after it had gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from streamrl.protocol.transport.types import Record

STEPS = 50
_PACE_STEPS = 20


def added(steps: Sequence[Record], live: Mapping[str, float]) -> dict[str, float]:
    """Return each counter's growth over the last steps and since, with the learner's current report as `live`."""
    window = _window(steps)
    now = {**window[-1].values, **live} if window else dict(live)
    before = window[0].values if window and window[0].step > 1 else {}
    # A learner that was rolled back to a checkpoint counts on from there.
    return {name: max(0.0, count - before.get(name, 0.0)) for name, count in now.items()}


def num_skipped(steps: Sequence[Record]) -> int:
    """Return how many of the last steps had a non-finite loss or gradient; each learner has its own count."""
    counts = [(record.term, record.values.get("train_optim/skipped_steps", 0.0)) for record in _window(steps)]
    if counts and _window(steps)[0].step <= 1:
        counts.insert(0, (0, 0.0))
    grown = (now - before if term == last else now for (last, before), (term, now) in pairwise(counts))
    return round(sum(max(0.0, growth) for growth in grown))


def _window(steps: Sequence[Record]) -> Sequence[Record]:
    """Return the last steps, and the one before them."""
    return steps[-STEPS - 1 :]


def eta_s(steps: Sequence[Record], share: float | None) -> float | None:
    """Extrapolate the pace of the last steps of one learner: between two learners the run may have stopped for days."""
    recent = [record for record in steps[-_PACE_STEPS:] if record.term == steps[-1].term]
    if not share or len(recent) < 2 or recent[-1].step <= recent[0].step:
        return None
    pace_s = (recent[-1].at - recent[0].at) / (recent[-1].step - recent[0].step)
    return max(0.0, pace_s * recent[-1].step * (1 / share - 1))
