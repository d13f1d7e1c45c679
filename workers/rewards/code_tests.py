"""The tests of a row, the program of a completion, and what became of each test: what all sandboxes share.

A row's field holds one of these, or its JSON as a text:

    [{"input": "2 3\n", "output": "5\n"}, ...]          a run each: what the program reads, and must print
    {"inputs": ["2 3\n", ...], "outputs": ["5\n", ...]}  the same, as APPS and TACO have it
    ["assert add(2, 3) == 5", ...]                      as MBPP has it: a run each, behind the program
    "def check(f): ...\ncheck(add)"                     as HumanEval has it: one run

Lines that are printed are compared without the spaces at their ends, and without empty lines at the end.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.config import schema
from streamrl.errors import RewardError
from streamrl.workers.rewards.base import ScoreItem

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MAX_SHOWN = 60
_FORMS = 'a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, or a list of code'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    stdin: str = ""
    expected: str | None = None  # what is to be printed
    then: str = ""  # code that runs behind the program


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run of a program ended."""

    ended: str  # `done`, or what else
    why: str = ""
    stdout: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one test."""

    passed: bool
    why: str = ""  # it did not
    seconds: float = 0.0


class Sandbox(Protocol):
    async def run(self, program: str, case: Case) -> Ending:
        """RewardError where the sandbox failed, and not the program."""


def program_of(completion: str) -> str:
    """Its last block of code; all of it where there is none."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def cases_of(fields: Mapping[str, Any], field: str) -> list[Case]:
    """RewardError for a row that holds none."""
    if field not in fields:
        raise RewardError(f"the row has no field {field!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    held = fields[field]
    if isinstance(held, str) and held.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):  # it is code
            held = json.loads(held)
    cases = _read(held)
    if not cases:
        raise RewardError(f"field {field!r} holds no tests, which are {_FORMS}: {held!r:.80}")
    return cases


def _read(held: Any) -> list[Case]:
    if isinstance(held, str):
        return [Case(then=held)] if held.strip() else []
    if isinstance(held, Mapping) and not held.get("fn_name"):
        inputs, outputs = held.get("inputs"), held.get("outputs")
        if not (isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and len(inputs) == len(outputs)):
            return []
        held = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    cases = [_read_one(one) for one in held] if isinstance(held, list) else []
    return [] if None in cases else [one for one in cases if one is not None]


def _read_one(one: Any) -> Case | None:
    if isinstance(one, str) and one.strip():
        return Case(then=one)
    if isinstance(one, Mapping) and isinstance(one.get("input"), str) and isinstance(one.get("output"), str):
        return Case(stdin=one["input"], expected=one["output"])
    return None


def outcome_of(case: Case, ending: Ending) -> Outcome:
    """A program that ends itself has printed what it had to, maybe; but a test behind it never ran."""
    why = "" if ending.ended == "done" else ending.why
    if ending.ended == "exited" and case.expected is not None and ending.why.endswith("status 0"):
        why = ""
    if not why and case.expected is not None and _lines(ending.stdout) != _lines(case.expected):
        why = f"printed {_shown(ending.stdout)}, not {_shown(case.expected)}"
    return Outcome(passed=not why, why=why, seconds=ending.seconds)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _shown(text: str) -> str:
    stripped = text.strip()
    return repr(stripped if len(stripped) <= _MAX_SHOWN else stripped[:_MAX_SHOWN] + "...")


async def judge(item: ScoreItem, tests: schema.Tests, sandbox: Sandbox, *, every: bool) -> list[Outcome]:
    """Of each test in turn; without `every` until one tells that not all pass."""
    program, outcomes = program_of(item.completion), []
    for case in cases_of(item.fields, tests.field):
        outcomes.append(outcome_of(case, await sandbox.run(program, case)))
        if not (every or outcomes[-1].passed):
            break
    return outcomes


def score_of(outcomes: Sequence[Outcome], *, partial: bool) -> float:
    passed = [one.passed for one in outcomes]
    return sum(passed) / len(passed) if partial else float(all(passed))
