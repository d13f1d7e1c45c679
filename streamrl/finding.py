"""A finding of the checks before a run: one line of `streamrl doctor`. Trial processes write theirs as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from streamrl import process

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str  # what was checked
    level: Level
    evidence: str
    remedy: str = ""  # may be empty if an error's evidence says what to do


def ok(name: str, evidence: str) -> Finding:
    return Finding(name=name, level="ok", evidence=evidence)


def warning(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name=name, level="warning", evidence=evidence, remedy=remedy)


def error(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name=name, level="error", evidence=evidence, remedy=remedy)


def take_stdout() -> Callable[[Finding], None]:
    """Return a function that sends findings to the parent process."""
    lines = process.take_stdout()

    def write(finding: Finding) -> None:
        lines.write(json.dumps(asdict(finding)) + "\n")
        lines.flush()

    return write
