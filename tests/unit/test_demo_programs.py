"""What a demonstration makes before its run: programs side by side, and what is begun when one of them has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.demos.run import Trials, program, run_all
from streamrl.errors import PartError, UserError
from streamrl.ops.launch.processes import Command


def python(folder: Path, name: str, code: str) -> Command:
    return program(name, ["-c", code], {}, logs=folder)


def until(file: Path) -> str:
    """Code that waits for a file, and not for ever."""
    return f"import pathlib, time; [time.sleep(0.01) for _ in range(6000) if not pathlib.Path({str(file)!r}).exists()]"


def test_what_comes_then_begins_when_the_first_has_ended_and_beside_the_others(tmp_path: Path) -> None:
    made = tmp_path / "made"
    waiting = python(tmp_path, "waiting", until(made))  # ends only once the last has begun
    then = python(tmp_path, "then", f"open({str(made)!r}, 'w')")
    run_all([waiting, python(tmp_path, "first", "")], lambda _: None, then=[then])
    assert made.exists()


def test_nothing_comes_then_before_one_has_ended_and_its_failure_counts(tmp_path: Path) -> None:
    seen, made = tmp_path / "seen", tmp_path / "made"
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:  # looks, of which each has left the time to begin
            seen.touch()

    first = python(tmp_path, "first", f"{until(seen)}; open({str(made)!r}, 'w')")
    then = python(tmp_path, "then", f"import pathlib, sys; sys.exit(3 if pathlib.Path({str(made)!r}).exists() else 0)")
    with pytest.raises(PartError, match="then ended with exit code 3"):
        run_all([first], say, then=[then])


def test_a_mistake_of_the_users_that_a_program_finds_is_told_as_one(tmp_path: Path) -> None:
    code = "import sys; print('error: no such setting'); sys.exit(2)"
    with pytest.raises(UserError, match="checks: no such setting"):
        run_all([python(tmp_path, "checks", code)], lambda _: None)


def test_a_run_is_tried_with_what_was_made_but_the_user_has_the_last_word(tmp_path: Path) -> None:
    trials = Trials(Path("game.yaml"), ["seed=2"], logs=tmp_path)
    assert not trials.are_made
    command = trials.command(["model.path=base"])
    assert trials.are_made
    assert command.arguments[-5:] == ("config", "check", "game.yaml", "model.path=base", "seed=2")
