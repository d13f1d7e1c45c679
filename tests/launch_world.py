"""Shared by tests of the launcher and the monitor: a run as seen from outside, made up by the test."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.view import View
from streamrl.protocol.transport.snapshot import Snapshot, StreamCounts
from streamrl.protocol.transport.types import Record, RunInfo
from streamrl.telemetry.progress import Report
from streamrl.versions import make_version

NOW = 1_000_000.0


def make_record(step: int, **values: float) -> Record:
    return Record(id=f"{step}-0", step=step, term=1, at=NOW + step, values=values)


def step_record(step: int, **values: float) -> Record:
    return make_record(step, **{"train_optim/optim_step": float(step), **values})


def make_report(part: str, **changes: Any) -> Report:
    fields: dict[str, Any] = {
        "part": part,
        "role": part.partition("/")[0],
        "host": "here",
        "pid": 1,
        "state": "working",
        "doing": "train",
        "since": NOW,
        "last_progress": NOW,
        "at": NOW,
    }
    return Report(**{**fields, **changes})


def make_run(**config: Any) -> RunInfo:
    return RunInfo(uid="uid", name="run", term=1, config_json=json.dumps(config), fingerprint="f", state="running")


def make_snapshot(**changes: Any) -> Snapshot:
    counts = StreamCounts(num_tickets=0, num_leased=0, leased_by={}, num_groups=0)
    fields: dict[str, Any] = {
        "at": NOW,
        "run": make_run(),
        "created_at": NOW,
        "step": 0,
        "holder": "me",
        "control": "run",
        "streams": {"train": counts, "eval": counts},
        "num_dead": 0,
        "latest_version": make_version(1, 0),
        "latest_version_step": 0,
        "reports": (),
        "records": (),
        "events": (),
        "used_memory_bytes": 0,
        "max_memory_bytes": 0,
    }
    return Snapshot(**{**fields, **changes})


def make_view(*records: Record, max_steps: int = 100, snapshot: Snapshot | None = None) -> View:
    """The view of a watcher that has read these records."""
    config = make_run(training={"max_steps": max_steps})
    seen = replace(snapshot or make_snapshot(), run=config)
    return build_view(seen, run_name="run", server="here", history=History.of(records))
