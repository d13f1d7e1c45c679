"""What the scenarios found, as rows: one line of JSON each in the file that `STREAMRL_FAULTS_REPORT` names.

Without it the rows are nowhere but in the assertions of the tests. Only appends, in one write a row, so several
processes may share a file.
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
    """What one scenario did to a run, and what the independent audit says of it afterwards."""

    scenario: str  # T4; where a scenario has several tests, T24 commit.written
    injections: int  # how often something was killed, stopped, dropped
    lost: int
    twice: int
    recovery_s: float | None = None  # from the injection to progress; of several the longest
    wasted_steps: int | None = None  # made, and made again after a restart
    more: Mapping[str, float] = field(default_factory=dict)  # zombie_writes, reclaim_s, orphans: what the scenario adds


def report(
    scenario: str,
    audit: Audit,
    *,
    injections: int,
    recovery_s: float | None = None,
    wasted_steps: int | None = None,
    **more: float,
) -> Row:
    """Note the row, and hold what every scenario must hold: nothing lost, nothing twice, and the books balance."""
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


def note(row: Row) -> None:
    """A row of a scenario that issues no tickets is noted as it is."""
    if path := os.environ.get(VARIABLE):
        line = json.dumps({**asdict(row), "at": time.time()}) + "\n"
        with open(path, "a") as file:
            file.write(line)
