"""What a demonstration makes before its run: programs side by side, and what is tried beside them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.demos.quickstart import write_base_model
from streamrl.demos.run import Trials, program, run_all, write_rows
from streamrl.errors import PartError, UserError
from streamrl.ops.launch.processes import Command

GAME = Path(__file__).parents[2] / "conf" / "game.yaml"


def python(folder: Path, name: str, code: str) -> Command:
    return program(name, ["-c", code], {}, logs=folder)


def until(file: Path) -> str:
    """Code that waits for a file, and not for ever."""
    return f"import pathlib, time; [time.sleep(0.01) for _ in range(6000) if not pathlib.Path({str(file)!r}).exists()]"


def test_what_is_tried_meanwhile_is_tried_while_the_programs_run(tmp_path: Path) -> None:
    tried, made = tmp_path / "tried", tmp_path / "made"
    waiting = python(tmp_path, "waiting", f"{until(tried)}; open({str(made)!r}, 'w')")

    run_all([waiting], lambda _: None, meanwhile=tried.touch)

    assert made.exists()


def test_a_core_is_free_once_one_of_the_programs_has_ended(tmp_path: Path) -> None:
    free, called = tmp_path / "free", []

    def has_ended() -> None:
        called.append("b" if (tmp_path / "b").exists() else "a")
        free.touch()

    first = python(tmp_path, "first", f"open({str(tmp_path / 'a')!r}, 'w')")
    second = python(tmp_path, "second", f"{until(free)}; open({str(tmp_path / 'b')!r}, 'w')")
    run_all([first, second], lambda _: None, when_one_has_ended=has_ended)

    assert called == ["a"]
    assert (tmp_path / "b").exists()


def test_a_mistake_that_is_found_meanwhile_ends_the_programs(tmp_path: Path) -> None:
    def find() -> None:
        raise UserError("no such reward")

    with pytest.raises(UserError, match="no such reward"):
        run_all([python(tmp_path, "waiting", until(tmp_path / "never"))], lambda _: None, meanwhile=find)


def test_a_failure_of_one_program_is_told_with_its_exit_code(tmp_path: Path) -> None:
    programs = [
        python(tmp_path, "waiting", until(tmp_path / "never")),
        python(tmp_path, "failing", "raise SystemExit(3)"),
    ]
    with pytest.raises(PartError, match="failing ended with exit code 3"):
        run_all(programs, lambda _: None)


def test_a_mistake_of_the_users_that_a_program_finds_is_told_as_one(tmp_path: Path) -> None:
    code = "import sys; print('error: no such setting'); sys.exit(2)"
    with pytest.raises(UserError, match="checks: no such setting"):
        run_all([python(tmp_path, "checks", code)], lambda _: None)


def test_rewards_are_tried_before_the_model_is_there_and_the_user_has_the_last_word(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1>", "answer": "1"}\n')
    overrides = [
        "environment=null",
        'rewards={exact: {type: function, target: exact_match, options: {field: "right"}}}',
    ]
    trials = Trials(GAME, overrides, console=Console(file=io.StringIO()))
    assert not trials.are_made

    with pytest.raises(UserError, match=r"rewards.exact.target = 'exact_match' fails for .*rows.jsonl:1"):
        trials.undergo([f"data.train={rows}", f"data.validation={rows}", f"model.path={tmp_path / 'none'}"])

    assert trials.are_made


def test_a_full_disk_is_told_with_the_file_that_did_not_fit(tmp_path: Path) -> None:
    rows, weights, settings = (tmp_path / name for name in ("rows.jsonl", "model.safetensors", "config.json"))
    for file in (rows, weights, settings):
        file.symlink_to("/dev/full")

    with pytest.raises(OSError, match=str(rows)):
        write_rows(rows, [{"prompt": "1<"}])
    with pytest.raises(OSError, match=str(weights)):
        write_base_model(tmp_path, seed=0)
    weights.unlink()
    with pytest.raises(OSError, match=str(settings)):
        write_base_model(tmp_path, seed=0)
