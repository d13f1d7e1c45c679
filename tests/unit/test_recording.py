"""Recordings on disk: what goes in comes out, whatever happened to the writer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import DataError, ResourceError
from streamrl.ops.record.recorded import RecordedGroups
from streamrl.ops.record.write import RecordingWriter
from streamrl.protocol.recording import Origin, Recording, begin_file, file_name, files_of, open_group
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.group import encode_group
from tests.helpers import make_group, make_ticket

ORIGIN = Origin(run="run", run_uid="uid", fingerprint="model", model="models/tiny")


def make_entry(number: int, *, padding: int = 0) -> Entry:
    header, body = encode_group(make_group(make_ticket(number)))
    return Entry(id=f"{1000 + number}-0", number=number, run_uid="uid", header=header, body=body + b"x" * padding)


@contextmanager
def writing(folder: Path, *, origin: Origin = ORIGIN, **limits: int) -> Iterator[RecordingWriter]:
    bounds = {"file_bytes": 1 << 20, "max_bytes": 1 << 30, **limits}
    with RecordingWriter(folder, origin, **bounds) as writer:
        yield writer


def record(folder: Path, numbers: range, **settings: Any) -> RecordingWriter:
    with writing(folder, **settings) as writer:
        writer.append([make_entry(number) for number in numbers])
    return writer


def recorded(folder: Path) -> list[int]:
    return [entry.number for entry in Recording.open(folder).entries()]


def test_what_is_recorded_is_read_as_it_lay_in_the_stream(tmp_path: Path) -> None:
    record(tmp_path, range(3))

    recording = Recording.open(tmp_path)

    assert list(recording.entries()) == [make_entry(number) for number in range(3)]
    assert recording.origin == ORIGIN
    assert recording.tears == {}
    assert [open_group(entry).header.ticket for entry in recording.entries()] == [0, 1, 2]


def test_any_group_can_be_read_by_its_place(tmp_path: Path) -> None:
    record(tmp_path, range(9), file_bytes=1500)
    recording = Recording.open(tmp_path)
    chosen = [recording.places[at] for at in (7, 0, 4)]

    assert [entry.number for entry in recording.entries(chosen)] == [7, 0, 4]


def test_a_full_file_is_followed_by_another(tmp_path: Path) -> None:
    record(tmp_path, range(20), file_bytes=2000)

    sizes = [path.stat().st_size for path in files_of(tmp_path)]
    assert len(sizes) > 2
    assert max(sizes) <= 2000
    assert recorded(tmp_path) == list(range(20))


def test_beyond_the_cap_the_oldest_file_goes_and_its_groups_are_counted(tmp_path: Path) -> None:
    writer = record(tmp_path, range(40), file_bytes=2000, max_bytes=6000)

    left = recorded(tmp_path)
    assert left == list(range(40 - len(left), 40))
    assert writer.written.num_dropped == 40 - len(left) > 0
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 6000


def test_a_second_session_goes_on_behind_the_first(tmp_path: Path) -> None:
    record(tmp_path, range(3))

    with writing(tmp_path) as writer:
        assert writer.last_id == make_entry(2).id
        writer.append([make_entry(3)])

    assert recorded(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_lost", [1, 50, 300])
def test_a_torn_file_is_read_up_to_the_tear_and_gone_on_with(tmp_path: Path, num_lost: int) -> None:
    record(tmp_path, range(3))
    [path] = files_of(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - num_lost)
    assert recorded(tmp_path) == [0, 1]
    assert list(Recording.open(tmp_path).tears) == [path]

    with writing(tmp_path) as writer:
        assert writer.last_id == make_entry(1).id
        writer.append([make_entry(number) for number in (2, 3)])

    assert recorded(tmp_path) == [0, 1, 2, 3]


@given(num_left=st.integers(min_value=0, max_value=2000))
def test_a_file_cut_anywhere_gives_its_whole_groups_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, num_left: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    record(folder, range(4))
    [path] = files_of(folder)
    with path.open("r+b") as file:
        file.truncate(min(num_left, path.stat().st_size))
    nothing = num_left < 200  # the beginning alone is as long
    if nothing:
        with contextlib.suppress(DataError):
            assert recorded(folder) == []
    else:
        numbers = recorded(folder)
        assert numbers == list(range(len(numbers)))


def test_zeros_that_a_file_system_left_at_the_end_are_a_tear(tmp_path: Path) -> None:
    record(tmp_path, range(2))
    [path] = files_of(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(500))

    assert recorded(tmp_path) == [0, 1]
    assert Recording.open(tmp_path).tears == {path: 500}


def test_a_beginning_that_only_looks_whole_is_a_tear(tmp_path: Path) -> None:
    (tmp_path / file_name(1)).write_bytes(begin_file(ORIGIN)[:-1] + b"?")
    with pytest.raises(DataError, match="holds no recording"):
        Recording.open(tmp_path)

    record(tmp_path, range(2))

    assert recorded(tmp_path) == [0, 1]
    assert list(Recording.open(tmp_path).tears) == [tmp_path / file_name(1)]


def test_a_flipped_bit_in_the_middle_is_found_when_the_group_is_read(tmp_path: Path) -> None:
    record(tmp_path, range(3))
    place = Recording.open(tmp_path).places[1]
    with place.path.open("r+b") as file:
        file.seek(place.offset + 40)
        file.write(b"\xff\xff")

    with pytest.raises(DataError, match=r"group 1001-0 at byte \d+ is damaged: .* digest"):
        recorded(tmp_path)
    shown = RecordedGroups(tmp_path).latest(3)
    assert [(entry.id, bool(entry.header)) for entry in shown] == [
        ("1000-0", True),
        ("1001-0", False),
        ("1002-0", True),
    ]


def test_two_writers_in_one_folder_are_one_too_many(tmp_path: Path) -> None:
    with writing(tmp_path), pytest.raises(ResourceError, match="another process records into"), writing(tmp_path):
        pass


def test_the_recording_of_another_run_is_not_continued(tmp_path: Path) -> None:
    record(tmp_path, range(1))
    other = Origin(run="run", run_uid="another", fingerprint="model", model="m")

    with pytest.raises(DataError, match="recording of another run"), writing(tmp_path, origin=other):
        pass
    record(tmp_path, range(1, 2))  # the lock was let go


def test_a_folder_of_something_else_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a recording"):
        Recording.open(tmp_path / "nowhere")
    (tmp_path / "00000001.groups").write_bytes(b"something else altogether, and longer than the magic")
    with pytest.raises(DataError, match="is not a file of a recording"):
        Recording.open(tmp_path)


def test_an_entry_too_large_for_a_group_is_left_out_and_counted(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.append([make_entry(0), make_entry(1, padding=70 << 20), make_entry(2)])

    assert writer.written.num_too_large == 1
    assert recorded(tmp_path) == [0, 2]
