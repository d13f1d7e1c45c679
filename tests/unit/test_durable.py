from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamrl.crashpoints import CrashAt, Point, SimulatedCrash, armed
from streamrl.files import _exchange, create_exclusively, replace_folder, write_durably


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_durably(tmp_path / "file", b"old")
    write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_several_that_create_a_file_exactly_one_succeeds(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: create_exclusively(tmp_path / "file", f"{i}".encode()), range(8)))
    assert made.count(True) == 1
    assert (tmp_path / "file").read_bytes() == f"{made.index(True)}".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_durably(tmp_path / "folder", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_disk_that_is_full_is_told_with_the_file_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write says it: without a name

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(tmp_path / "mine.yaml", b"data")
    assert caught.value.filename == str(tmp_path / "mine.yaml")
    assert list(tmp_path.iterdir()) == []


def make(folder: Path, text: str) -> Path:
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "file").write_text(text)
    return folder


def held(folder: Path) -> str | None:
    file = folder / "in" / "file"
    return file.read_text() if file.exists() else None


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    monkeypatch.setattr("streamrl.files._exchange", lambda one, other: False)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_and_nothing_is_left_beside_it(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        without_exchange(monkeypatch)
    for text in ("first", "second", "third"):
        replace_folder(make(tmp_path / "made", text), tmp_path / "folder")
        assert held(tmp_path / "folder") == text
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_old_folder_and_the_new_one_swap_their_names_before_the_old_one_goes(tmp_path: Path) -> None:
    passings: list[tuple[Point, str | None, str | None]] = []
    replace_folder(make(tmp_path / "first", "old"), tmp_path / "folder")
    made = make(tmp_path / "second", "new")
    with armed(lambda point: passings.append((point, held(tmp_path / "folder"), held(made)))):
        replace_folder(made, tmp_path / "folder")
    assert passings == [("file.aside", "old", "new"), ("file.renamed", "new", "old")]


def test_where_names_cannot_be_exchanged_the_next_call_puts_back_what_a_crash_took_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_exchange(monkeypatch)
    replace_folder(make(tmp_path / "first", "old"), tmp_path / "folder")
    with armed(CrashAt("file.aside", nth=2)), pytest.raises(SimulatedCrash):
        replace_folder(make(tmp_path / "second", "new"), tmp_path / "folder")
    assert (held(tmp_path / "folder"), held(tmp_path / "second")) == (None, "new")
    with armed(CrashAt("file.aside")), pytest.raises(SimulatedCrash):
        replace_folder(make(tmp_path / "third", "newer"), tmp_path / "folder")
    assert held(tmp_path / "folder") == "old"


def test_folders_that_cannot_be_exchanged_for_another_reason_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _exchange(tmp_path / "nowhere", tmp_path / "nowhere else")
