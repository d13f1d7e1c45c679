"""Compares the verdict with the product's own: `streamrl audit --json` must say the same of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.judge.books import Verdict

_ALIKE = ("issued", "trained", "dropped", "dead", "outstanding")
_WRONG = ("lost", "twice", "contradictory")


def disagreements(verdict: Verdict, audit: Mapping[str, Any]) -> list[str]:
    """Return the differences between the two."""
    told = [(name, getattr(verdict, name), audit[name]) for name in _ALIKE]
    told += [(name, verdict.count(name), audit[name]) for name in _WRONG]
    told.append(("clean", not sum(map(verdict.count, _WRONG)), bool(audit["clean"])))
    return [f"{name}: the judge {mine!r}, the audit {its!r}" for name, mine, its in told if mine != its]
