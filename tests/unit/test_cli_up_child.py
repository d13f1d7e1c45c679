"""The launcher beside a program: what it does in the run's folder before the run begins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.errors import DataError, ResourceError
from streamrl.files import only_one
from streamrl.ops.cli.training.up_child import orphan_in, run, steps_saved
from streamrl.ops.python.request import Request
from tests.helpers import make_unreadable
from tests.run_folder import RunFolder

CONFIG = {
    "name": "mine",
    "model": {"path": "no/such/model"},
    "data": {"train": "none.jsonl"},
    "validation": {"every_steps": 0},
}
REWARDS = ('rewards.near={"type": "function", "target": "near.pkl:near"}',)


def ask(told: list[str]) -> None:
    request = Request(config=CONFIG, overrides=REWARDS, functions={"near": b"new"}, takeover=False)
    run(request, lambda kind, **_: told.append(kind))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "mine"


def test_a_run_that_does_not_begin_leaves_no_function_of_it(place: Path) -> None:
    told: list[str] = []

    with pytest.raises(DataError, match=r"model.path = 'no/such/model'"):
        ask(told)

    assert told == []
    assert not place.exists()


def test_a_run_that_does_not_go_on_keeps_the_function_that_it_had(place: Path) -> None:
    (place / "rewards").mkdir(parents=True)
    (place / "rewards" / "near.pkl").write_bytes(b"old")

    with pytest.raises(DataError):
        ask([])

    assert (place / "rewards" / "near.pkl").read_bytes() == b"old"


def test_a_run_that_goes_on_elsewhere_keeps_its_function(place: Path) -> None:
    with only_one(place, "mine"), pytest.raises(ResourceError, match="the run 'mine' is live"):
        ask([])

    assert not (place / "rewards").exists()


@contextmanager
def launcher(place: Path, *, of: int) -> Iterator[int]:
    """A process that calls itself one, of this program, and has the folder."""
    words = ["-c", "import signal; print(flush=True); signal.pause()", "streamrl.ops.cli.training.up_child", str(of)]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        place.mkdir(parents=True, exist_ok=True)
        (place / "up.lock").write_text(str(process.pid))
        yield process.pid
        process.kill()


def test_a_launcher_whose_program_is_gone_is_waited_for_and_no_other(place: Path) -> None:
    assert orphan_in(place) is None
    with launcher(place, of=os.getpid()):
        assert orphan_in(place) is None
    with launcher(place, of=1_000_000_000) as pid:
        assert orphan_in(place) == pid
    assert orphan_in(place) is None


def test_a_program_hears_that_its_run_has_ended_whether_or_not_the_disk_tells_at_which_step(place: Path) -> None:
    folder = RunFolder(place)
    folder.term(1)
    folder.journal("e000001-s00000004", (4, "trained", [(0, 16)]))
    folder.checkpoint("e000001-s00000004", issued=20, ended=16, journal="e000001-s00000004")
    assert steps_saved(place) == 4
    make_unreadable(place / "run.json")
    assert steps_saved(place) == 0
