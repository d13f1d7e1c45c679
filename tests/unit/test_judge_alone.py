"""The judge shares no code with those it judges: it imports the standard library, redis, msgpack and numpy alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.test_import_rules import imported_modules

FOLDER = Path(__file__).parents[1] / "faults" / "judge"
OWN = "tests.faults.judge"
ALLOWED = {*sys.stdlib_module_names, "redis", "msgpack", "numpy"}


def foreign(source: str) -> list[str]:
    """What it imports beside what it may; an import that is made up while it runs counts as one."""
    names = [name for _, name in imported_modules(source)]
    return [name for name in names if name.partition(".")[0] not in ALLOWED and not f"{name}.".startswith(f"{OWN}.")]


def test_the_judge_imports_nothing_of_streamrl_or_of_its_tests() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 5
    assert {file.name: found for file in files if (found := foreign(file.read_text()))} == {}


def test_no_relative_import_and_no_import_by_a_name_that_is_made_up_leads_out() -> None:
    for file in FOLDER.glob("*.py"):
        source = file.read_text()
        assert "importlib" not in source, file
        assert "__import__" not in source, file
        assert "from ." not in source, file


@pytest.mark.parametrize(
    "source",
    [
        "import streamrl",
        "from streamrl.ops.audit import audit_folder",
        "def f():\n    from tests.helpers import wait_until",
        "import xxhash",
        "from tests.faults import harness",
        "from tests.faults.judged import kinds",
    ],
)
def test_a_foreign_import_is_seen(source: str) -> None:
    assert foreign(source)
