"""A file that a command shall write is looked at before the work is done whose outcome it shall hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.ops.cli.main import main


@pytest.mark.parametrize(
    "command",
    [
        "plot runs/x --output",
        "eval runs/x --output",
        "record export recording --output",
        "reward read-hh source --prompts x --pairs",
        "reward read-hh source --pairs x --prompts",
    ],
)
@pytest.mark.parametrize(
    ("output", "told"), [("nowhere/x.png", "there is no folder 'nowhere'"), ("folder.png", "is a directory")]
)
def test_where_nothing_can_be_written_the_command_says_so_at_once(
    command: str,
    output: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()

    assert main([*command.split(), output]) == 2

    assert told in capsys.readouterr().err


def test_a_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "x.pdf")]) == 2
    assert "must end in .png" in capsys.readouterr().err
