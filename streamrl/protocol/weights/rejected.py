"""A version that workers reject: how long the run tolerates it, and the remedy. With g = `weights.give_up_after_s`:

    worker    rejected ─► fetched again ─► rejected ─► within g/5, at a random moment: another engine ─► rejected
                          ─► delivers nothing; ends unless it verifies a version within g
    learner   no worker serves the newest version for 3/5 g: the run ends; for 9/10 g while some workers still start

A worker's report carries `rejected`, the reason ("" or absent when all is well), and `rejected_version`, the version in
its display form. Both are removed when a version is verified.
"""

from __future__ import annotations

from collections.abc import Mapping

# An engine takes 10 to 60 s to start, and the whole fleet rejects a bad version within moments. If all restarted their
# engines at once, they would read the same model from the same disk, and no worker would be left while it loads.
_LONGEST_SPREAD_S = 60.0

REMEDY_OF_ALL = (
    "engine and learner disagree about this model: remove what changes the engine's arithmetic from worker.engine_args "
    "(quantization, kv_cache_dtype), or set worker.engine=transformers, which computes as the learner does; "
    "weights.dtype=float32, which rounds less, needs a new run (--fork); weights.prove=false continues without proofs"
)


def spread_s(give_up_after_s: float) -> float:
    """Return the interval within which a worker picks a random moment to restart its engine."""
    return min(_LONGEST_SPREAD_S, give_up_after_s / 5)


def borne_s(give_up_after_s: float, *, some_start: bool) -> float:
    """Return how long a version that no worker serves may be rejected before the run ends.

    By default 3 minutes: one for the spread, one for the engine's start, and one for two loads. It is over before the
    first worker gives up.
    """
    return give_up_after_s * (0.9 if some_start else 0.6)


def rejects(detail: Mapping[str, int | float | str]) -> tuple[str, str]:
    """Return (reason, version) of the rejection in a worker's report; "" if there is none."""
    return str(detail.get("rejected", "")), str(detail.get("rejected_version", ""))
