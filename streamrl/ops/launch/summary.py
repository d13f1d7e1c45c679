"""The outcome of a run: the audit of its tickets, and facts from its folder and its workers.

metrics.jsonl    lag, held-out rewards                Redis        versions published
audit            trained, dropped, lost, twice        supervisor   restarts, versions that workers loaded
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.ops.audit import Audit
from streamrl.ops.monitor.history import HELD_OUT, History
from streamrl.protocol.transport.types import Record

_AUDIT_KEYS = ("issued", "trained", "dropped", "dead", "outstanding", "lost", "twice", "clean")
_LENGTHS, _SIZE = "train_rollouts/response_lengths", "train_rollouts/rollout_size"
_OF_STEPS = ("lag/mean", "lag/max", _LENGTHS, _SIZE)  # all that a summary needs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLag:
    """In optimizer steps, over all trained tokens."""

    mean: float
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Weight versions loaded, over all lives of all workers."""

    loaded: int = 0
    in_flight: int = 0  # those loaded while samples were being generated


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    name: str
    folder: str
    state: str
    seconds: float  # of this launch
    audit: Audit
    versions_published: int
    loads: Loads
    lag: TokenLag | None  # None before the first step
    held_out: Mapping[str, tuple[float, float]]  # by reward source: in the first and the last validation that ranks
    restarts: Mapping[str, int]  # by part
    export: str | None  # the trained model, for plain transformers

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the audit found wrong, or could not check."""
        return (*self.audit.problems, *self.audit.unchecked)

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "audit"}
        audit = self.audit.to_json()
        return {**fields, **{n: audit[n] for n in _AUDIT_KEYS}, "steps": audit["step"], "remarks": self.remarks}


def lag_of(steps: list[Record]) -> TokenLag | None:
    measured = [record.values for record in steps if "lag/mean" in record.values]
    tokens = [values[_LENGTHS] * values[_SIZE] for values in measured]
    if not sum(tokens):
        return None
    total = sum(values["lag/mean"] * weight for values, weight in zip(measured, tokens, strict=True))
    return TokenLag(mean=total / sum(tokens), max=round(max(values["lag/max"] for values in measured)))


def held_out_of(history: History) -> dict[str, tuple[float, float]]:
    names = sorted({name for record in history.validations.records for name in record.values})
    means = {name: history.ranked(name) for name in names if name.startswith(f"{HELD_OUT}/")}
    return {name.removeprefix(f"{HELD_OUT}/"): (found[0], found[-1]) for name, found in means.items() if found}


def summarise(
    *,
    folder: Path,
    state: str,
    seconds: float,
    audit: Audit,
    versions_published: int,
    loads: Loads,
    restarts: Mapping[str, int],
) -> RunSummary:
    history = History.read(folder, of_steps=_OF_STEPS)
    export = folder / "export"
    return RunSummary(
        name=audit.run,
        folder=str(folder),
        state=state,
        seconds=round(seconds, 1),
        audit=audit,
        versions_published=versions_published,
        loads=loads,
        lag=lag_of(history.steps.records),
        held_out=held_out_of(history),
        restarts=dict(restarts),
        export=str(export) if state == "finished" and export.is_dir() else None,
    )


def summary_lines(summary: RunSummary) -> list[tuple[str, str]]:
    """Return (name, value) pairs for people."""
    audit, loads = summary.audit, summary.loads
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(audit.dropped.items()))
    lines = [
        ("run", f"{summary.state} after {audit.step} steps; this launch took {summary.seconds:.0f} s"),
        ("groups trained", f"{audit.trained} of {audit.issued} tickets"),
        ("dropped", f"{sum(audit.dropped.values())}" + (f" ({dropped})" if dropped else "")),
        ("left over", f"{audit.outstanding} outstanding, {audit.dead} dead"),
        ("lost, twice", f"{audit.lost}, {audit.twice}"),
        (
            "weight versions",
            f"{summary.versions_published} published; "
            f"{loads.loaded} loaded by workers, {loads.in_flight} of them while they generated",
        ),
    ]
    if summary.lag is not None:
        lines.append(("lag of a token", f"{summary.lag.mean:.2f} steps on average, {summary.lag.max} at most"))
    for source, (before, after) in summary.held_out.items():
        lines.append((f"held out: {source}", f"{before:.3f} → {after:.3f}"))
    if summary.restarts:
        lines.append(("restarts", ", ".join(f"{part} {count} times" for part, count in summary.restarts.items())))
    lines += [("remark", remark) for remark in summary.remarks]
    lines.append(("model", summary.export or "not exported: the run has not finished"))
    return lines
