"""What a machine says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.host import computes_in_bfloat16, usable_cores


@pytest.mark.parametrize(
    ("text", "is_so"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse avx512f avx512_bf16 sha_ni\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu sse avx2\nmodel name\t: bf16 of a kind\n", False),
        ("", False),
    ],
)
def test_cores_compute_in_bfloat16_where_linux_lists_such_products(tmp_path: Path, text: str, is_so: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert computes_in_bfloat16(tmp_path / "cpuinfo") is is_so


def test_a_machine_that_says_nothing_of_its_cores_is_taken_for_one_without(tmp_path: Path) -> None:
    assert not computes_in_bfloat16(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("limit", "at_most"),
    [("100000 100000", 1), ("50000 100000", 1), ("99999900000 100000", None), ("max 100000", None), (None, None)],
)
def test_cores_are_those_of_the_container(tmp_path: Path, limit: str | None, at_most: int | None) -> None:
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    expected = at_most or len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == expected
