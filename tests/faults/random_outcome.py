"""The outcome of a run exposed to random faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamrl.ops.audit import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What existed after the run and not before."""

    processes: int
    descriptors: int  # of the process that started all others, plus the excess of the part with the most
    threads: int  # of the process that started all others
    keys: int  # not of the run, or beyond what an undisturbed run has
    shared_memory: int  # names in /dev/shm

    @property
    def num_found(self) -> int:
        return sum(max(0, count) for count in asdict(self).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seed: int
    seconds: float
    injections: Mapping[str, int]  # by kind
    recoveries_s: Sequence[float]  # from the end of the faults to the next checkpoint
    wasted_steps: int
    wrong_weights: int  # workers that found a version other than what was published
    surprises: Sequence[str]  # parts that ended without explanation
    num_given_up: int  # learners that ended because no group came, and were replaced
    leaks: Leaks
    audit: Audit

    @property
    def num_injections(self) -> int:
        return sum(self.injections.values())

    @property
    def p95_s(self) -> float:
        """A measured value, not an interpolation."""
        return sorted(self.recoveries_s)[int(0.95 * (len(self.recoveries_s) - 1))]

    @property
    def ok(self) -> bool:
        is_sound = self.audit.clean and not self.audit.outstanding and not self.wrong_weights
        return is_sound and not self.surprises and not self.leaks.num_found

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "injections": dict(self.injections),
            "recovery_p95_s": self.p95_s,
            "recovery_longest_s": max(self.recoveries_s),
            "wasted_steps": self.wasted_steps,
            "wrong_weights": self.wrong_weights,
            "surprises": list(self.surprises),
            "num_given_up": self.num_given_up,
            "leaks": asdict(self.leaks),
            "audit": self.audit.to_json(),
            "ok": self.ok,
        }

    def render(self) -> list[str]:
        audit, leaks = self.audit, self.leaks
        dropped = sum(audit.dropped.values())
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(self.injections.items()))
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s: {'ok' if self.ok else 'FAILED'}",
            f"  injected       {self.num_injections}: {told}",
            f"  issued         {audit.issued:,} = trained {audit.trained:,} + dropped {dropped:,} + dead {audit.dead:,}"
            f" + outstanding {audit.outstanding:,}",
            f"  lost {audit.lost}, twice {audit.twice}, contradictory {audit.contradictory}, unproven {audit.unproven},"
            f" wrong weights served {self.wrong_weights}",
            f"  recovery       p95 {self.p95_s:.2f} s, longest {max(self.recoveries_s):.2f} s",
            f"  wasted steps   {self.wasted_steps} beside {audit.step:,}",
            f"  given up       {self.num_given_up} learners, for want of groups",
            f"  leaks          processes {leaks.processes}, descriptors {leaks.descriptors}, threads {leaks.threads},"
            f" keys {leaks.keys}, /dev/shm {leaks.shared_memory}",
        ]
        return lines + [f"  surprise       {text}" for text in self.surprises]
