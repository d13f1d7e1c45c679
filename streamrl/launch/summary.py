"""What a run came to: the audit of its tickets, and what its folder and its workers have to say.

metrics.jsonl    lag, versions, held-out rewards      Watch        versions that workers loaded
audit            trained, dropped, lost, twice        supervisor   what was started again
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.audit import Audit
from streamrl.launch.watch import VALIDATION, Loads
from streamrl.transport.types import RunState
from streamrl.versions import epoch_of, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """In optimizer steps, over all tokens that were trained."""

    mean: float
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    name: str
    folder: str
    state: RunState
    seconds: float  # of this launch
    steps: int
    issued: int
    trained: int
    dropped: Mapping[str, int]
    dead: int
    outstanding: int
    lost: int
    twice: int
    clean: bool  # the audit found nothing wrong
    remarks: tuple[str, ...]  # what the audit found wrong, or could not look at
    versions_published: int
    loads: Loads
    lag: Lag | None  # None before the first step
    held_out: Mapping[str, tuple[float, float]]  # by reward source: at the first and at the last validation
    restarts: Mapping[str, int]  # by part
    export: str | None  # the trained model, for plain transformers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`metrics.jsonl`: of a step that was made again after a crash, the later record counts."""

    steps: tuple[Mapping[str, float], ...]
    validations: tuple[Mapping[str, float], ...]

    @staticmethod
    def read(folder: Path) -> History:
        steps: dict[float, Mapping[str, float]] = {}
        validations: dict[float, Mapping[str, float]] = {}
        for record in read_lines(folder / "metrics.jsonl"):
            (validations if VALIDATION in record else steps)[record["step"]] = record
        return History(
            steps=tuple(steps[step] for step in sorted(steps)),
            validations=tuple(validations[step] for step in sorted(validations)),
        )

    def lag(self) -> Lag | None:
        measured = [record for record in self.steps if "lag/mean" in record]
        tokens = [_response_tokens(record) for record in measured]
        if not sum(tokens):
            return None
        total = sum(record["lag/mean"] * weight for record, weight in zip(measured, tokens, strict=True))
        return Lag(mean=total / sum(tokens), max=round(max(record["lag/max"] for record in measured)))

    def num_versions(self, *, latest: int = 0) -> int:
        """Each learner publishes from number 0 on, in the order of its steps; `latest` may have come after the last."""
        newest: dict[int, int] = {}
        for version in (*(int(record.get("weights/version", 0)) for record in self.steps), latest):
            newest[epoch_of(version)] = max(newest.get(epoch_of(version), 0), number_of(version))
        return sum(number + 1 for epoch, number in newest.items() if epoch)

    def held_out(self) -> dict[str, tuple[float, float]]:
        names = sorted({name for record in self.validations for name in record if name.startswith(f"{VALIDATION}/")})
        curves = {name: [record[name] for record in self.validations if name in record] for name in names}
        return {name.removeprefix(f"{VALIDATION}/"): (curve[0], curve[-1]) for name, curve in curves.items()}


def _response_tokens(record: Mapping[str, float]) -> float:
    return record["train_rollouts/response_lengths"] * record["train_rollouts/rollout_size"]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON lines; the last one may be cut off by a crash."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def summarise(
    *,
    name: str,
    folder: Path,
    state: RunState,
    seconds: float,
    audit: Audit,
    latest_version: int,  # 0: none
    loads: Loads,
    restarts: Mapping[str, int],
) -> Summary:
    history = History.read(folder)
    export = folder / "export"
    return Summary(
        name=name,
        folder=str(folder),
        state=state,
        seconds=round(seconds, 1),
        steps=audit.step,
        issued=audit.issued,
        trained=audit.trained,
        dropped=dict(audit.dropped),
        dead=audit.dead,
        outstanding=audit.outstanding,
        lost=audit.lost,
        twice=audit.twice,
        clean=audit.clean,
        remarks=(*audit.problems, *audit.unchecked),
        versions_published=history.num_versions(latest=latest_version),
        loads=loads,
        lag=history.lag(),
        held_out=history.held_out(),
        restarts=dict(restarts),
        export=str(export) if state == "finished" and export.is_dir() else None,
    )


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """(name, value) for people."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.dropped.items()))
    lines = [
        ("run", f"{summary.state} after {summary.steps} steps; this launch took {summary.seconds:.0f} s"),
        ("groups trained", f"{summary.trained} of {summary.issued} tickets"),
        ("dropped", f"{sum(summary.dropped.values())}" + (f" ({dropped})" if dropped else "")),
        ("left over", f"{summary.outstanding} outstanding, {summary.dead} dead"),
        ("lost, twice", f"{summary.lost}, {summary.twice}"),
        ("weight versions", f"{summary.versions_published} published; {_loads(summary.loads)}"),
    ]
    if summary.lag is not None:
        lines.append(("lag of a token", f"{summary.lag.mean:.2f} steps on average, {summary.lag.max} at most"))
    for source, (before, after) in summary.held_out.items():
        lines.append((f"held out: {source}", f"{before:.3f} → {after:.3f}"))
    if summary.restarts:
        lines.append(("started again", ", ".join(f"{part} {count} times" for part, count in summary.restarts.items())))
    lines += [("remark", remark) for remark in summary.remarks]
    lines.append(("model", summary.export or "not exported: the run has not finished"))
    return lines


def _loads(loads: Loads) -> str:
    return f"{loads.loaded} loaded by workers, {loads.in_flight} of them while they generated"
