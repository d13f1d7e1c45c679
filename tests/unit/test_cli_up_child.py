"""The launcher beside a program: what it does in the run's folder before the run begins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config
from streamrl.errors import ConfigError, DataError, PartError, ResourceError
from streamrl.files import only_one
from streamrl.ops.cli.training.up_child import orphan_in, run, steps_saved
from streamrl.ops.python.launcher import Launcher
from streamrl.ops.python.request import Request
from tests.helpers import make_unreadable, wait_until
from tests.made_checkpoint import make_checkpoint
from tests.run_folder import RunFolder
from tests.run_folders import make_folder

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


@pytest.mark.parametrize("functions", [{"near": b"new"}, {}])
def test_a_run_that_is_live_is_refused_before_anything_is_tried(place: Path, functions: dict[str, bytes]) -> None:
    told: list[str] = []
    request = Request(config=CONFIG, overrides=REWARDS, functions=functions, takeover=False)

    with (
        only_one(place, "mine"),
        pytest.raises(ResourceError, match=r"end it \(`streamrl stop runs/mine`, `run.stop\(\)`, or Ctrl-C where"),
    ):
        run(request, lambda kind, **_: told.append(kind))

    assert told == []


def write_model(folder: Path) -> None:
    """As far as files are checked."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_a_start_that_is_given_up_while_it_is_checked_leaves_the_function_that_was_there(place: Path) -> None:
    """Both signals, of which each may come first, and none while the folder is restored."""
    write_model(place.parents[1] / "model")
    os.mkfifo(place.parents[1] / "slow.jsonl")
    (place / "rewards").mkdir(parents=True)
    stored = place / "rewards" / "near.pkl"
    stored.write_bytes(b"old")
    config = {**CONFIG, "model": {"path": "model"}, "data": {"train": "slow.jsonl"}}

    started = Launcher(Request(config=config, overrides=REWARDS, functions={"near": b"new"}, takeover=False))
    wait_until(lambda: stored.read_bytes() == b"new", description="the new function, for the trials")
    started.end_now()

    assert stored.read_bytes() == b"old"
    with pytest.raises(PartError, match=r"^the launcher was asked to end before the run had begun$"):
        started.wait_until_started(lambda text: None)


def heard_of_finished(root: Path, *overrides: str, **functions: bytes) -> list[dict[str, Any]]:
    """What a program hears that starts a run of 12 steps which has finished, with the function `near`."""
    target = f"{root}/big/rewards/near.pkl:near"
    near = f'{{"type": "function", "target": "{target}"}}'
    folder = make_folder(root, "big", "finished", **{"rewards.near": near})
    (folder / "rewards").mkdir()
    (folder / "rewards" / "near.pkl").write_bytes(b"old")
    make_checkpoint(load_config(folder / "config.yaml").config)
    heard: list[dict[str, Any]] = []
    request = Request(
        config=str(folder / "config.yaml"), overrides=tuple(overrides), functions=functions, takeover=False
    )
    run(request, lambda kind, **fields: heard.append({"kind": kind, **fields}))
    assert (folder / "rewards" / "near.pkl").read_bytes() == b"old"
    return heard


def test_a_program_hears_that_a_finished_run_trained_nothing_and_how_to_train(tmp_path: Path) -> None:
    said, begun, ended = heard_of_finished(tmp_path, near=b"old")

    assert re.fullmatch(
        r"run big had finished \(12 steps, \S+ ago\): nothing was trained; \{'name': 'big-2'\} starts another run, "
        r"\{'training.max_steps': 24\} continues it",
        said["text"],
    )
    assert (begun["name"], ended["state"], ended["steps"]) == ("big", "finished", 12)


def test_a_program_hears_what_of_its_request_a_finished_run_has_not_used(tmp_path: Path) -> None:
    changed, said, *_ = heard_of_finished(tmp_path, "optimizer.lr=3e-5", near=b"new")

    assert changed["text"].startswith("not used, since the run has finished: optimizer.lr: ")
    assert "nothing was trained, nor were the new functions used: near; " in said["text"]


def test_a_program_that_starts_a_finished_run_with_what_makes_it_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^seed: 1234 -> 7: .*\n.* with `name=NEW`$"):
        heard_of_finished(tmp_path, "seed=7")


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
