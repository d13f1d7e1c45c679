"""The recent steps of a run: their pace, and what they have added to its counters. Pure.

Counters grow over the whole run. A cause derived from them alone would be shown for days after it had gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from streamrl.protocol.transport.types import Record

EPOCH = "train_rollouts/epoch"
STEPS = 50
_PACE_STEPS = 20
_PAUSED = 10.0  # times the usual pace


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


def step_s(steps: Sequence[Record]) -> float | None:
    """Return how long a step usually takes, also after one that a pause made long."""
    times = [record.values["timers/step"] for record in steps[-_PACE_STEPS:] if "timers/step" in record.values]
    return median(times) if times else None


def eta_s(steps: Sequence[Record], *, max_steps: int, max_epochs: int) -> float | None:
    """Extrapolate the last steps of one learner to the bound that they reach first; `max_steps` is -1 without one.
    Between two learners the run may have stopped for days."""
    recent = [record for record in steps[-_PACE_STEPS:] if record.term == steps[-1].term]
    if len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    left = [float(max_steps - last.step)] if max_steps > 0 else []  # steps
    if EPOCH in first.values and (grown := last.values.get(EPOCH, 0.0) - first.values[EPOCH]) > 0:
        left.append((max_epochs - last.values[EPOCH]) * (last.step - first.step) / grown)
    return max(0.0, min(left) * _pace_s(recent)) if left else None


def _pace_s(recent: Sequence[Record]) -> float:
    """Return the mean time of a step without those in which the run was paused."""
    paces = [(after.at - before.at) / (after.step - before.step) for before, after in pairwise(recent)]
    usual = median(paces)
    return fmean(pace for pace in paces if pace <= _PAUSED * abs(usual))
