"""A run that has finished: `streamrl up` starts it only where there is more to do, and each way to go on that is told
gives it more."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_config
from streamrl.config.schema import Config
from streamrl.ops.cli.main import main
from streamrl.ops.launch.finished import nothing_left_of
from tests.made_checkpoint import make_checkpoint
from tests.run_folders import make_folder

BY_ITS_DATA = {"training.max_steps": -1}
BY_ITS_STEPS = {"training.max_steps": 12}
BY_ITS_DATA_BEFORE_ITS_STEPS = {"training.max_steps": 1000, "training.max_epochs": 3}


def config_of(words: list[str]) -> Config:
    """What `streamrl up` of these words reads; options are left out."""
    begin = words.index("up") + 1
    settings = [word for word in words[begin + 1 :] if "=" in word]
    return load_config(words[begin], settings).config


def commands_in(told: str) -> list[list[str]]:
    lines = [shlex.split(line) for line in told.splitlines() if "streamrl up" in line]
    return [words[words.index("streamrl") :] for words in lines]


def test_a_finished_run_is_not_started_again_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, str], None]
) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    before = sorted(folder.rglob("*"))
    began = time.monotonic()
    assert main(["up", str(folder / "config.yaml")]) == 0
    record_property("figure", f"streamrl up on a finished run: {time.monotonic() - began:.2f} s")
    told = capsys.readouterr().out
    assert "run big has finished: 12 steps" in told
    for way in ("training.max_steps=24", "name=big-2", f"--fork {folder}@12"):
        assert way in told
    assert sorted(folder.rglob("*")) == before
    assert main(["up", str(folder / "config.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained"] == 48


def finished_with_checkpoint(root: Path) -> Path:
    folder = make_folder(root, "big", "finished")
    make_checkpoint(load_config(folder / "config.yaml").config)
    return folder


def test_a_finished_run_refuses_the_changes_that_a_stopped_one_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else its result would pass for that of other settings."""
    folder = finished_with_checkpoint(tmp_path)
    assert main(["up", str(folder / "config.yaml"), "seed=7", "--json"]) == 2
    told = capsys.readouterr()
    assert (told.out, "error: seed: 1234 -> 7: it decides which prompts" in told.err) == ("", True)


def test_a_finished_run_tells_which_new_settings_it_has_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_with_checkpoint(tmp_path)
    assert main(["up", str(folder / "config.yaml"), "optimizer.lr=3e-5", "--json"]) == 0
    told = capsys.readouterr()
    assert re.fullmatch(r"not used, since the run has finished: optimizer.lr: .* -> 3e-05\n", told.err)
    assert json.loads(told.out)["trained"] == 48


def test_the_ways_to_go_on_after_a_finished_run_keep_what_was_overridden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "my runs", "big", "finished")
    overrides = [f"dir={folder.parent}", "name=big", "training.max_steps=12"]
    assert main(["up", "conf/reinforce.yaml", *overrides]) == 0
    ways = commands_in(capsys.readouterr().out)
    place, more, other = f"dir={folder.parent}", "training.max_steps=24", "name=big-2"
    begin = ["streamrl", "up", "conf/reinforce.yaml", place]
    assert ways == [
        [*begin, "name=big", more],
        [*begin, "training.max_steps=12", other],
        [*begin, other, more, "--fork", f"{folder}@12"],
    ]


@pytest.mark.parametrize(
    ("state", "before", "asked", "is_done"),
    [
        ("finished", {"training.max_steps": 12}, ["training.max_steps=12"], True),
        ("finished", {"training.max_steps": 12}, ["training.max_steps=5"], True),
        ("finished", {"training.max_steps": 12}, ["training.max_steps=13"], False),
        ("finished", {"training.max_steps": 12}, ["training.max_steps=-1"], False),
        ("finished", {"training.max_steps": -1}, ["training.max_steps=-1"], True),
        ("finished", {"training.max_steps": -1}, ["training.max_steps=-1", "training.max_epochs=2"], False),
        ("stopped", {"training.max_steps": 12}, ["training.max_steps=12"], False),
        ("running", {"training.max_steps": 12}, ["training.max_steps=12"], False),
    ],
)
def test_a_run_goes_on_where_its_settings_give_it_more_to_do(
    tmp_path: Path, state: str, before: dict[str, Any], asked: list[str], is_done: bool
) -> None:
    folder = make_folder(tmp_path, "big", state, **before)
    config = load_config(folder / "config.yaml", asked).config
    assert (nothing_left_of(config) is not None) == is_done


@pytest.mark.parametrize(
    ("before", "bound"),
    [
        (BY_ITS_DATA, "training.max_epochs=2"),
        (BY_ITS_STEPS, "training.max_steps=24"),
        (BY_ITS_DATA_BEFORE_ITS_STEPS, "training.max_epochs=6"),
    ],
)
def test_each_way_to_go_on_raises_the_bound_that_ended_the_run(
    tmp_path: Path, before: dict[str, Any], bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished", **before)
    assert main(["up", str(folder / "config.yaml")]) == 0
    ways = commands_in(capsys.readouterr().out)
    assert [nothing_left_of(config_of(words)) for words in ways] == [None, None, None]
    assert [bound in words for words in ways] == [True, False, True]
    assert main(["why", str(folder)]) == 0
    assert f"raise {bound.partition('=')[0]} to continue it" in " ".join(capsys.readouterr().out.split())


def test_a_bound_below_the_steps_made_is_raised_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, "big", "finished", **BY_ITS_DATA)
    assert main(["up", str(folder / "config.yaml"), "training.max_steps=5"]) == 0
    more, *_ = commands_in(capsys.readouterr().out)
    assert nothing_left_of(config_of(more)) is None


@pytest.mark.parametrize("before", [BY_ITS_DATA, BY_ITS_STEPS])
@pytest.mark.parametrize("command", ["dead ls", "dead retry --all", "pause"])
def test_what_needs_a_learner_names_a_command_that_starts_one(
    tmp_path: Path, command: str, before: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "my runs", "big", "finished", **before)
    assert main([*command.split(), str(folder)]) == 2
    (told,) = re.findall("`(.*)`", capsys.readouterr().err)
    assert nothing_left_of(config_of(shlex.split(told))) is None
