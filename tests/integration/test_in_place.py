"""What an engine makes of many deltas in their places is what it makes of a load of all weights, to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.in_place import CASES

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

IN_PLACE = [name for name in CASES if name != "qwen3_moe"]


def run(folder: Path, *names: str) -> dict[str, Any]:
    output = folder / "rows.jsonl"
    words = [sys.executable, "-m", "tests.integration.in_place", str(output), *names]
    subprocess.run(words, check=True, timeout=600, capture_output=True)
    return {row["case"]: row for row in map(json.loads, output.read_text().splitlines())}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one process after the other: vLLM is imported once."""
    return run(tmp_path_factory.mktemp("rows"), *CASES)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", IN_PLACE)
def test_many_deltas_in_place_are_a_load_of_all_weights(rows: dict[str, Any], case: str) -> None:
    row = rows[case]
    assert row["reasons"] == [""], row
    assert (row["off"], row["wrong"], row["unreadable"]) == (0.0, [], [])
    assert row["moved"] > 0.1


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", IN_PLACE)
def test_a_delta_that_is_not_written_as_it_is_is_found(rows: dict[str, Any], case: str) -> None:
    row = rows[case]
    assert [name.endswith("down_proj.weight") for name in row["left behind"]] == [True]
    [one_bit] = row["one bit"]
    assert f".{CASES[case].one_bit}." in one_bit or one_bit == "lm_head.weight"


@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", IN_PLACE)
def test_after_a_delta_that_failed_in_its_middle_no_other_is_taken(rows: dict[str, Any], case: str) -> None:
    assert rows[case]["failed"]
    assert "cannot be applied to version 0" in rows[case]["after it failed"]


@pytest.mark.timeout(700)
def test_what_has_no_place_is_loaded_as_a_whole_and_says_why(rows: dict[str, Any]) -> None:
    [reason] = rows["qwen3_moe"]["reasons"]
    assert "experts" in reason
