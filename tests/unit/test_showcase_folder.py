"""The folder of a demonstration: cleared when it is its own, and left alone when it is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from streamrl.demos.run import clear
from streamrl.errors import ConfigError


def test_a_fresh_start_clears_what_a_quickstart_has_left_and_keeps_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    assert not clear(folder, what="quickstart")
    (folder / "checkpoints" / "e000001").mkdir(parents=True)
    (folder / "up.lock").touch()

    assert clear(folder, what="quickstart")

    assert not (folder / "checkpoints").exists()
    assert (folder / "up.lock").exists()
    assert clear(folder, what="quickstart")


def test_a_folder_of_somebody_else_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()

    with pytest.raises(ConfigError, match=r"holds files that are not from a quickstart; choose another name"):
        clear(tmp_path, what="quickstart")

    assert (tmp_path / "thesis.tex").exists()


def test_a_demonstration_does_not_clear_what_another_has_left(tmp_path: Path) -> None:
    clear(tmp_path / "run", what="demo")

    with pytest.raises(ConfigError, match=r"files that are not from a quickstart"):
        clear(tmp_path / "run", what="quickstart")


def test_a_clearing_that_is_cut_short_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clear(tmp_path, what="quickstart")
    (tmp_path / "checkpoints").mkdir()

    def is_interrupted(_: Path) -> None:
        assert (tmp_path / ".quickstart").exists()
        raise KeyboardInterrupt

    listed = sorted(tmp_path.iterdir())  # the mark first
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", is_interrupted)
        patch.setattr(Path, "iterdir", lambda _: iter(listed))
        with pytest.raises(KeyboardInterrupt):
            clear(tmp_path, what="quickstart")

    assert clear(tmp_path, what="quickstart")
    assert not (tmp_path / "checkpoints").exists()
