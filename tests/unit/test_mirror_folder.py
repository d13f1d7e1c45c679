"""The folder of a worker's mirror: one worker's alone, and not left behind for good by one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import ResourceError
from workers.mirror_folder import mirror_folder


def leave_behind(root: Path, worker: str) -> Path:
    """What a killed worker leaves: its folder, whose lock nobody holds."""
    with mirror_folder("run", worker, root=root) as folder:
        left = folder.with_suffix(".kept")
        folder.rename(left)
    left.rename(folder)
    (folder / "model.safetensors").write_bytes(b"large")
    return folder


def test_a_folder_is_there_while_its_worker_lives(tmp_path: Path) -> None:
    with mirror_folder("run", "one", root=tmp_path) as folder:
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_worker_left_goes_when_any_worker_starts(tmp_path: Path) -> None:
    left = leave_behind(tmp_path, "dead")
    assert left.is_dir()
    with mirror_folder("other", "one", root=tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_worker_that_comes_again_under_its_name_begins_with_an_empty_folder(tmp_path: Path) -> None:
    leave_behind(tmp_path, "one")
    with mirror_folder("run", "one", root=tmp_path) as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_the_folders_of_the_living_stay(tmp_path: Path) -> None:
    with mirror_folder("run", "one", root=tmp_path) as one, mirror_folder("run", "two", root=tmp_path) as two:
        assert {one, two} == set(tmp_path.iterdir())


def test_two_workers_of_one_name_are_one_too_many(tmp_path: Path) -> None:
    with (
        mirror_folder("run", "one", root=tmp_path),
        pytest.raises(ResourceError, match="'one': give each worker a --worker-id"),
        mirror_folder("run", "one", root=tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_mirror_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "streamrl-other").mkdir()
    with mirror_folder("run", "one", root=tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["streamrl-other"]
