"""The scenarios' results as rows: one JSON line each in the file that `STREAMRL_FAULTS_REPORT` names.

Without the variable, results only show in the tests' assertions. Each row is appended in a single write, so several
processes can share a file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from streamrl.ops.audit import Audit

VARIABLE = "STREAMRL_FAULTS_REPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one scenario did to a run, and the independent audit's findings afterwards."""

    scenario: str  # T4; for a scenario with several tests, T24 commit.written
    injections: int  # how often something was killed, stopped or dropped
    lost: int
    twice: int
    recovery_s: float | None = None  # from the injection to progress; the longest of several
    wasted_steps: int | None = None  # steps repeated after a restart
    more: Mapping[str, float] = field(default_factory=dict)  # the scenario's own: zombie_writes, reclaim_s, orphans


def report(
    scenario: str,
    audit: Audit,
    *,
    injections: int,
    recovery_s: float | None = None,
    wasted_steps: int | None = None,
    **more: float,
) -> Row:
    """Note the row, and assert what every scenario must satisfy: nothing lost, nothing twice, balanced books."""
    row = Row(
        scenario=scenario,
        injections=injections,
        lost=audit.lost,
        twice=audit.twice,
        recovery_s=recovery_s,
        wasted_steps=wasted_steps,
        more=more,
    )
    note(row)
    assert audit.clean, f"{scenario}: {audit.to_json()}"
    return row


def is_judged() -> bool:
    """Whether `make chaos` runs this test. Figures of speed count there, and not beside other tests."""
    return VARIABLE in os.environ


def note(row: Row) -> None:
    """Append a row as it is; called directly by scenarios that issue no tickets."""
    if path := os.environ.get(VARIABLE):
        line = json.dumps({**asdict(row), "at": time.time()}) + "\n"
        with open(path, "a") as file:
            file.write(line)
