"""A version that workers reject: how long that is borne, and what to do about it. With g = `weights.give_up_after_s`:

    worker    rejected ─► fetched anew ─► rejected ─► within g/5, at a moment of its own: another engine ─► rejected
                          ─► nothing is delivered; without a version that it proves within g, the worker ends
    learner   nobody serves the newest version for 3/5 g: the run ends; for 9/10 g where some workers still start

A worker's report tells it: `rejected` is what its engine failed at, "" or absent when all is well, `rejected_version`
the version as people write it. Both go when a version is proved.
"""

from __future__ import annotations

from collections.abc import Mapping

# An engine takes 10 to 60 s to start, and all of a fleet reject a bad version within moments: were they to start their
# engines together, they would ask the same disk for the same model, and none would be there while it loads.
_LONGEST_SPREAD_S = 60.0

REMEDY_OF_ALL = (
    "engine and learner disagree about this model: remove what changes the engine's arithmetic from worker.engine_args "
    "(quantization, kv_cache_dtype), or set worker.engine=transformers, which computes as the learner does; "
    "weights.dtype=float32, which rounds less, needs a new run (--fork); weights.prove=false continues without proofs"
)


def spread_s(give_up_after_s: float) -> float:
    """A worker starts another engine at some moment of so long."""
    return min(_LONGEST_SPREAD_S, give_up_after_s / 5)


def borne_s(give_up_after_s: float, *, some_start: bool) -> float:
    """So long a version that nobody serves may be rejected, before the run ends. By default 3 minutes: one for the
    spread, one for the engine's start, and one for two loads; and it is over before the first worker gives up."""
    return give_up_after_s * (0.9 if some_start else 0.6)


def rejects(detail: Mapping[str, int | float | str]) -> tuple[str, str]:
    """(what for, which version), of a worker's report; "" where there is nothing."""
    return str(detail.get("rejected", "")), str(detail.get("rejected_version", ""))
