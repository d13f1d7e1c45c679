"""`streamrl reward`: what is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.ops.cli.main import main


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("full", "is not empty; nothing is overwritten"),
        ("file", "cannot create the folder "),
        ("file/below", "cannot create the folder "),
    ],
)
def test_a_folder_that_cannot_take_the_trained_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, reason: str
) -> None:
    (tmp_path / "full" / "of").mkdir(parents=True)
    (tmp_path / "file").touch()
    arguments = ["reward", "train", "--model", "any", "--pairs", "any", "--output", str(tmp_path / output)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output: ")
    assert reason in error
