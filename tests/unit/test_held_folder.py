"""Folders in common places: one process's alone, gone with it, and not left behind for good by one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from streamrl.errors import ResourceError
from streamrl.held_folders import mirror_folder, remove_those_of_the_dead, scratch_folder

_HOLDER = """
import sys, signal
from pathlib import Path
from streamrl.held_folders import mirror_folder, scratch_folder
with mirror_folder("run", sys.argv[2], root=Path(sys.argv[1])), scratch_folder(root=Path(sys.argv[1])):
    print("holds", flush=True)
    signal.pause()
"""


def leave_behind(root: Path, worker: str) -> set[Path]:
    """What a killed process leaves: its folders, whose locks nobody holds."""
    before = set(root.iterdir())
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(root), worker], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        process.send_signal(signal.SIGKILL)
    left = set(root.iterdir()) - before
    assert len(left) == 2
    for folder in left:
        (folder / "model.safetensors").write_bytes(b"large")
    return left


def test_folders_are_there_while_their_process_wants_them(tmp_path: Path) -> None:
    with mirror_folder("run", "one", root=tmp_path) as mirror, scratch_folder(root=tmp_path) as scratch:
        for folder in (mirror, scratch):
            assert folder.is_dir()
            assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_else_made_under_its_name_is_refused(tmp_path: Path) -> None:
    """The name of a mirror can be guessed; what workers serve is read from it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "streamrl-mirror-run-one").symlink_to(tmp_path / "elsewhere")
    refused = pytest.raises(ResourceError, match="streamrl-mirror-run-one is another user's, or a link")
    with refused, mirror_folder("run", "one", root=tmp_path):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_a_killed_process_left_goes_when_any_other_makes_a_folder(tmp_path: Path) -> None:
    leave_behind(tmp_path, "dead")
    with mirror_folder("other", "one", root=tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    leave_behind(tmp_path, "dead")
    with scratch_folder(root=tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_who_has_killed_a_process_can_remove_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("streamrl.held_folders._LONGEST_ROOT", 1000)
    leave_behind(tmp_path, "dead")
    with scratch_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
        left = leave_behind(tmp_path, "dead")
        remove_those_of_the_dead()
        assert not any(path.exists() for path in left)
        assert folder.is_dir()


def test_a_worker_that_comes_again_under_its_name_begins_with_an_empty_folder(tmp_path: Path) -> None:
    leave_behind(tmp_path, "one")
    with mirror_folder("run", "one", root=tmp_path) as folder:
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_the_folders_of_the_living_stay(tmp_path: Path) -> None:
    with (
        mirror_folder("run", "one", root=tmp_path) as one,
        mirror_folder("run", "two", root=tmp_path) as two,
        scratch_folder(root=tmp_path) as three,
        scratch_folder(root=tmp_path) as four,
    ):
        assert {one, two, three, four} == set(tmp_path.iterdir())


def test_two_workers_of_one_name_are_one_too_many(tmp_path: Path) -> None:
    with (
        mirror_folder("run", "one", root=tmp_path),
        pytest.raises(ResourceError, match="'one': give each worker a --worker-id"),
        mirror_folder("run", "one", root=tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_is_none_of_these_folders_is_not_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "streamrl-other").mkdir()
    (tmp_path / "streamrl-scratch-link").symlink_to(elsewhere)
    with mirror_folder("run", "one", root=tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "streamrl-other", "streamrl-scratch-link"}
    assert list(elsewhere.iterdir()) == []


def test_a_socket_fits_into_a_scratch_folder_also_where_the_common_folder_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with scratch_folder() as folder:
        assert len(os.fsencode(folder / "e5f8a5a2-5f0c-4c7c-9a5b-0f4f3f1f2a3b")) <= 107
