"""One line of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str  # what was looked at
    level: Level
    evidence: str
    remedy: str = ""


def ok(name: str, evidence: str) -> Finding:
    return Finding(name=name, level="ok", evidence=evidence)


def warning(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name=name, level="warning", evidence=evidence, remedy=remedy)


def error(name: str, evidence: str, remedy: str) -> Finding:
    return Finding(name=name, level="error", evidence=evidence, remedy=remedy)
