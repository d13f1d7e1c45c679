"""The outcomes of all judged runs, as a table and as JSON; and running them one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.measure import Say
from streamrl.held_folders import scratch_folder
from tests.faults.judged.kinds import KINDS
from tests.faults.judged.run import Judged, run_judged

_LONGEST_RUN_S = 900.0  # then it is the next kind's turn
_MOST_TOLD = 10  # violations shown per run
EVIDENCE = Path(__file__).parents[3] / "runs" / "judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    runs: Sequence[Judged]

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)

    @property
    def num_injections(self) -> int:
        return sum(sum(run.injections.values()) for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        runs = [{**asdict(run), "ok": run.ok} for run in self.runs]
        return {"runs": runs, "injections": self.num_injections, "ok": self.ok}

    def render(self) -> list[str]:
        heading = (
            "kind     seconds  injected  trained  dropped  dead  retries  forged  steps  found again"
            "  weights  recovery  violations  disagreements"
        )
        lines = [heading, *map(_line, self.runs)]
        told = Counter[str]()
        for run in self.runs:
            told.update(run.injections)
        lines.append(f"injected {self.num_injections}: " + ", ".join(f"{name} {n}" for name, n in sorted(told.items())))
        for run in self.runs:
            lines += [f"{run.kind}: {text}" for text in _wrong(run)]
        return lines


def sit(*, kinds: Sequence[str], seconds: float, seed: int, without: Collection[str], say: Say) -> Sitting:
    """Run these kinds in turn until the time is used up, each at least once."""
    each_s = min(seconds / len(kinds), _LONGEST_RUN_S)
    runs: list[Judged] = []
    while len(runs) < len(kinds) or sum(run.seconds for run in runs) + each_s <= seconds:
        kind, chosen = KINDS[kinds[len(runs) % len(kinds)]], seed + len(runs)
        say(f"run {len(runs) + 1}, {kind.name}, {each_s:.0f} s, seed {chosen}")
        with scratch_folder() as folder:
            run = run_judged(kind, folder, seconds=each_s, seed=chosen, without=without, keep=EVIDENCE, say=say)
        runs.append(run)
        say("ok" if run.ok else "\n".join(_wrong(run)))
    return Sitting(runs=runs)


def _line(run: Judged) -> str:
    verdict = run.verdict
    longest = max(run.recoveries_s, default=0.0)
    return (
        f"{run.kind:<7}  {run.seconds:>7.0f}  {sum(run.injections.values()):>8}  {verdict.trained:>7}"
        f"  {sum(verdict.dropped.values()):>7}  {verdict.dead:>4}  {run.num_retries:>7}  {run.num_forged:>6}"
        f"  {verdict.steps:>5}  {verdict.steps_checked:>11}  {run.weights_compared:>7}  {longest:>6.1f} s"
        f"  {len(run.violations):>10}  {len(run.disagreements):>13}"
    )


def _wrong(run: Judged) -> list[str]:
    """Return what is wrong with it."""
    found = [f"{one.kind}: {one.what} (ticket {one.ticket}, step {one.step})" for one in run.violations]
    more = [f"and {len(found) - _MOST_TOLD} more"] if len(found) > _MOST_TOLD else []
    stuck = [f"stuck: {run.stuck}"] if run.stuck else []
    evidence = [f"evidence: {run.evidence}"] if run.evidence else []
    return [*found[:_MOST_TOLD], *more, *run.disagreements, *stuck, *evidence]
