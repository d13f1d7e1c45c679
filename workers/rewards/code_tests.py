"""A row's tests, the program in a completion, and the outcome of each test: the part that all sandboxes share.

A row's field holds one of these forms, or its JSON as a string:

    [{"input": "2 3\n", "output": "5\n"}, ...]          one run each: stdin, and the expected stdout
    {"inputs": ["2 3\n", ...], "outputs": ["5\n", ...]}  the same, in the form of APPS and TACO
    ["assert add(2, 3) == 5", ...]                      the form of MBPP: one run each, after the program
    "def check(f): ...\ncheck(add)"                     the form of HumanEval: one run

Printed lines are compared without trailing spaces, and without empty lines at the end.
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

# A span within a line, which is no block, or a block with its content.
_FENCED = re.compile(r"```[^\n]*?```|```[^\n`]*\n(?P<block>.*?)(?:```|\Z)", re.DOTALL)
_MAX_SHOWN = 60
_FORMS = 'a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, or a list of code'


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeCase:
    stdin: str = ""
    expected: str | None = None  # the stdout that passes
    then: str = ""  # code that runs after the program


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnding:
    """How a run of a program ended."""

    ended: str  # `done`, or another reason
    why: str = ""
    stdout: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """The outcome of one test."""

    passed: bool
    why: str = ""  # why it failed
    seconds: float = 0.0


class Sandbox(Protocol):
    async def run(self, program: str, case: CodeCase) -> ProgramEnding:
        """Run the program on one test. RewardError if the sandbox failed, not the program."""


def program_of(completion: str) -> str:
    """Return the completion's last code block, or all of it if there is none."""
    blocks = [found["block"] for found in _FENCED.finditer(completion) if found["block"] is not None]
    return blocks[-1] if blocks else completion


def cases_of(fields: Mapping[str, Any], field: str) -> list[CodeCase]:
    """Read the row's tests. RewardError if it holds none."""
    if field not in fields:
        raise RewardError(f"the row has no field {field!r}; it has: {', '.join(sorted(fields)) or 'none'}")
    value = fields[field]
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):  # it is code
            value = json.loads(value)
    cases = _read(value)
    if not cases:
        raise RewardError(f"field {field!r} holds no tests ({_FORMS}), but {value!r:.80}")
    return cases


def _read(value: Any) -> list[CodeCase]:
    if isinstance(value, str):
        return [CodeCase(then=value)] if value.strip() else []
    if isinstance(value, Mapping) and not value.get("fn_name"):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not (isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and len(inputs) == len(outputs)):
            return []
        value = [{"input": stdin, "output": stdout} for stdin, stdout in zip(inputs, outputs, strict=True)]
    cases = [_read_one(test) for test in value] if isinstance(value, list) else []
    return [] if None in cases else [test for test in cases if test is not None]


def _read_one(test: Any) -> CodeCase | None:
    if isinstance(test, str) and test.strip():
        return CodeCase(then=test)
    if not isinstance(test, Mapping) or test.get("testtype") == "functional":  # of LiveCodeBench: arguments, no stdin
        return None
    if isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
        return CodeCase(stdin=test["input"], expected=test["output"])
    return None


def outcome_of(case: CodeCase, ending: ProgramEnding) -> CaseOutcome:
    """Judge one run. A program that exits by itself may have printed its answer; but a test after it never ran."""
    why = "" if ending.ended == "done" else ending.why
    if ending.ended == "exited" and case.expected is not None and ending.why.endswith("status 0"):
        why = ""
    if not why and case.expected is not None and _lines(ending.stdout) != _lines(case.expected):
        why = f"printed {_shown(ending.stdout)}, not {_shown(case.expected)}"
    return CaseOutcome(passed=not why, why=why, seconds=ending.seconds)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _shown(text: str) -> str:
    stripped = text.strip()
    return repr(stripped if len(stripped) <= _MAX_SHOWN else stripped[:_MAX_SHOWN] + "...")


async def judge(item: ScoreItem, tests: schema.Tests, sandbox: Sandbox, *, every: bool) -> list[CaseOutcome]:
    """Run the tests in turn; without `every`, only up to the first failure."""
    program, outcomes = program_of(item.completion), []
    for case in cases_of(item.fields, tests.field):
        outcomes.append(outcome_of(case, await sandbox.run(program, case)))
        if not (every or outcomes[-1].passed):
            break
    return outcomes


def score_of(outcomes: Sequence[CaseOutcome], *, partial: bool) -> float:
    passed = [one.passed for one in outcomes]
    return sum(passed) / len(passed) if partial else float(all(passed))
