"""What a machine says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.host import computes_in_bfloat16


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
