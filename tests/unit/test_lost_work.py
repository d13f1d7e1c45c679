"""Asked twice to end, the launcher says what is to be made again."""

from __future__ import annotations

from pathlib import Path

from streamrl.ops.launch.why_ended import describe_lost_work
from tests.helpers import make_unreadable
from tests.launch_world import make_view, step_record
from tests.run_folder import RunFolder


def test_steps_after_the_last_checkpoint_are_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.term(1)
    folder.journal("e000001-s00000004", (4, "trained", [(0, 16)]))
    folder.checkpoint("e000001-s00000004", issued=20, ended=16, journal="e000001-s00000004")

    message = describe_lost_work(folder.path, make_view(step_record(4), step_record(7)))

    assert "the run is back at step 4; 3 steps after it, the current step and" in message
    assert "; the current step" in describe_lost_work(folder.path, None)


def test_where_there_is_no_run_yet_nothing_is_to_be_made_again(tmp_path: Path) -> None:
    assert describe_lost_work(tmp_path, None) == "ended at once, before the run had started"


def test_a_disk_that_does_not_tell_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.term(1)
    make_unreadable(folder.path / "run.json")
    assert "which cannot be read now: [Errno 40]" in describe_lost_work(folder.path, None)
