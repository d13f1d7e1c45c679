"""Runs whose Redis is not there any more: what their folders tell, and that every command says it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest

from streamrl.errors import ConfigError
from streamrl.ops.cli.main import main
from streamrl.ops.monitor.comparison import compare
from streamrl.ops.monitor.remains import read_config
from streamrl.ops.monitor.runs import Listing, with_folders
from streamrl.ops.python.run import attach
from streamrl.process import started_at
from tests.run_folders import NUM_STEPS, make_folder


def change_state(folder: Path, **changes: Any) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("state", "exit_code", "run", "health"),
    [
        ("finished", 0, "finished  step 12/12", "healthy: the run has finished"),
        ("stopped", 5, "stopped  step 12/12", "ended: the run was stopped"),
        ("failed", 5, "failed  step 12/12", "ended: the learner ended with an error"),
        ("running", 5, "crashed  step 12/12", "ended: the run crashed"),
    ],
)
def test_status_tells_how_a_run_ended_from_its_folder(
    tmp_path: Path, state: str, exit_code: int, run: str, health: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", state, error="the reward said no" if state == "failed" else "")
    assert main(["status", str(folder)]) == exit_code
    told = capsys.readouterr().out
    assert run in told
    assert health in told
    assert "reward 1 " in told
    assert "held out exact 0.400" in told
    assert f"folder   {folder}" in told
    assert main(["why", str(folder)]) == exit_code
    why = capsys.readouterr().out
    assert "start Redis" not in why
    assert ("the reward said no" in why) == (state == "failed")


def test_the_dead_letters_of_a_run_that_has_ended_are_told_without_its_redis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "stopped")
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:-1]  # the last one is torn
    last = {**json.loads(lines[-2]), "step": 13, "stream/dead_letters": 2.0}
    (folder / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(last), ""]))
    assert main(["status", str(folder)]) == 5
    assert "2 letters" in capsys.readouterr().out


def test_a_redis_that_is_gone_for_good_is_no_trouble_of_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished", **{"redis.url": f"unix://{tmp_path}/gone.sock"})
    assert main(["status", str(folder)]) == 0
    assert main(["status", str(folder), "--run", "another"]) == 6
    assert "start Redis" not in capsys.readouterr().out.partition("another: unreachable")[0]


def test_the_json_of_a_finished_run_has_its_summary_and_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    assert main(["status", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"]["folder"], told["run"]["state"], told["run"]["step"]) == (str(folder), "finished", NUM_STEPS)
    assert (told["verdict"], told["summary"]["trained"], told["weights"]["latest"]) == ("healthy", 48, "1.12")
    assert told["learner"]["held_out"] == {"exact": [0.4]}


@pytest.mark.parametrize(
    ("command", "fields", "run"),
    [
        ("why", {"schema", "run", "verdict", "causes"}, "x"),
        ("status", {"schema", "at", "run", "verdict", "causes"}, {"name": "x"}),
    ],
)
def test_the_json_of_a_run_that_cannot_be_seen_has_the_types_of_one_that_can(
    tmp_path: Path, command: str, fields: set[str], run: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--redis", f"unix://{tmp_path}/gone.sock", "--run", "x", "--json"]) == 6
    told = json.loads(capsys.readouterr().out)
    assert (set(told), told["run"], told["verdict"]) == (fields, run, "unreachable")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_run_that_may_be_alive_is_not_called_crashed(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "running")
    if where == "here":
        change_state(folder, pid=os.getpid(), process_began=started_at(os.getpid()))
    else:
        change_state(folder, host="another")
    assert main(["status", str(folder)]) == 6
    told = " ".join(capsys.readouterr().out.split())
    assert "is not running here; the run in" in told
    assert "ran on" in told
    assert "streamrl up" not in told, "which would take the run from its learner"


def test_another_process_that_has_its_number_is_not_the_learner(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "big", "running")
    change_state(folder, pid=os.getpid())
    assert main(["status", str(folder)]) == 5


def test_a_run_that_no_learner_has_taken_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    for name in ("state.json", "summary.json", "metrics.jsonl", "run.json"):
        (folder / name).unlink()
    (folder / "terms").rmdir()
    (folder / "learner.error").write_text(json.dumps({"error": "data.train: no such file", "exit_code": 2}))
    assert main(["why", str(folder)]) == 5
    told = capsys.readouterr().out
    assert "the run has not started" in told
    assert "data.train: no such file" in told
    assert main(["stop", str(folder)]) == 2
    assert f"has not started; `streamrl up {folder}/config.yaml` starts it" in capsys.readouterr().err
    assert f"`streamrl up {folder}/config.yaml`" in " ".join(told.split())


@pytest.mark.parametrize(
    ("state", "term", "is_told"), [("stopped", 1, True), ("crashed", 1, True), ("stopped", 0, False)]
)
def test_why_the_launcher_ended_a_run_is_told_unless_it_went_on_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, term: int, is_told: bool
) -> None:
    folder = make_folder(tmp_path, "big", "running" if state == "crashed" else state)
    (folder / "launcher.error").write_text(json.dumps({"error": "reward/0: no such model", "term": term}))
    assert main(["why", str(folder)]) == 5
    told = " ".join(capsys.readouterr().out.split())
    assert f"the run {'crashed' if state == 'crashed' else 'was stopped'}" in told
    assert ("reward/0: no such model" in told) == is_told


def test_what_the_launcher_wrote_stands_in_for_the_learners_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    (folder / "state.json").unlink()
    assert main(["status", str(folder)]) == 0
    (folder / "summary.json").unlink()
    assert main(["status", str(folder)]) == 5
    assert "crashed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["weights ls", "weights show", "record --output {out}", "pause", "dead ls", "groups tail --eval"]
)
def test_what_cannot_be_done_is_one_line_that_says_why_and_what_to_do(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    first, *others = command.format(out=tmp_path / "rec").split()
    words = [first, str(folder), *others] if first == "record" else [first, *others, str(folder)]
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run 'big' has finished, after 12 steps")


@pytest.mark.parametrize(("command", "state"), [("stop", "finished"), ("drain", "stopped"), ("stop", "running")])
def test_a_run_that_has_ended_is_stopped_as_it_would_be_with_its_redis(
    tmp_path: Path, command: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", state)
    told = {"running": "crashed"}.get(state, state)
    assert main([command, str(folder)]) == 0
    assert capsys.readouterr().out == f"run big: {told}\n"
    assert main([command, str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["acknowledged"], shown["changed"]) == (told, True, False)


def test_groups_are_those_that_the_folder_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    assert main(["groups", "tail", str(folder), "-n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ticket")] == [
        "ticket 110   step 10   worker w",
        "ticket 111   step 11   worker w",
    ]
    assert "  what is 11?" in lines
    assert main(["groups", "show", str(folder), "103", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "what is 3?"
    assert main(["groups", "show", str(folder), "99"]) == 2


def test_an_ended_run_that_kept_no_groups_has_none_to_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    (folder / "rollouts.jsonl").unlink()
    assert main(["groups", "tail", str(folder), "-f"]) == 0
    assert capsys.readouterr().err == "no groups are kept: run 'big' has finished, after 12 steps\n"


@pytest.mark.parametrize("words", [["tail"], ["tail", "--json"], ["tail", "--color"], ["show", "103"]])
def test_groups_whose_reader_has_gone_end_as_any_command_does(tmp_path: Path, words: list[str]) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "groups", words[0], str(folder), *words[1:]]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=240, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_folders_are_listed_with_how_they_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, "big", "finished")
    make_folder(tmp_path, "small", "running")
    (tmp_path / "no-run").mkdir()
    assert main(["runs", "ls", "--dir", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert {run["name"]: (run["state"], run["step"]) for run in listed} == {
        "big": ("finished", 12),
        "small": ("crashed", 12),
    }
    assert main(["runs", "ls", "--dir", str(tmp_path)]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert main(["runs", "ls", "--dir", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


def test_folders_are_listed_where_the_redis_of_the_environment_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, "big", "finished")
    gone = f"unix://{tmp_path}/gone.sock"
    monkeypatch.setenv("STREAMRL_REDIS", gone)
    assert main(["runs", "ls", "--dir", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    listed = json.loads(told.out)
    assert (listed["complete"], [run["name"] for run in listed["runs"]]) == (False, ["big"])
    assert told.err.startswith("warning: STREAMRL_REDIS: ")
    assert main(["runs", "ls", "--dir", str(tmp_path), "--redis", gone]) == 2


@pytest.mark.parametrize("server", ["", "host:6379"])
def test_folders_are_listed_where_the_environment_names_no_server(
    tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, "big", "finished")
    monkeypatch.setenv("STREAMRL_REDIS", server)
    assert main(["runs", "ls", "--dir", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    listed = json.loads(told.out)
    assert (listed["complete"], [run["name"] for run in listed["runs"]]) == (not server, ["big"])
    assert ("is not a server address" in told.err) == bool(server)


class Guarded(PosixPath):
    """As for a user who may not look into `theirs`; root, who may run the tests, may look anywhere."""

    def is_file(self, **changes: Any) -> bool:
        if "theirs" in self.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return super().is_file(**changes)


def test_a_folder_that_may_not_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("big", "broken", "theirs"):
        folder = make_folder(tmp_path, name, "finished")
        if name == "broken":
            (folder / "metrics.jsonl").unlink()
            (folder / "metrics.jsonl").mkdir()
    listing = with_folders(Listing(runs=(), is_complete=True), Guarded(tmp_path))
    assert [run.name for run in listing.runs] == ["big"]
    with pytest.raises(ConfigError, match=r"theirs/config.yaml cannot be read: Permission denied$"):
        read_config(Guarded(tmp_path / "theirs"))


def test_the_end_of_a_long_run_is_known_without_reading_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()[:-1]  # the last one is torn
    nothing_of_ours = b'{"step": 999}\n' * 100_000  # whoever reads it fails
    path.write_bytes(nothing_of_ours + b"x" * 2_000_000 + b"\n" + b"\n".join(lines))
    run = attach(folder)
    assert (run.wait().steps, run.wait().reward) == (NUM_STEPS, 1.0)
    assert main(["runs", "ls", "--dir", str(tmp_path), "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["runs"]] == [NUM_STEPS]


def test_what_holds_a_run_back_is_wrapped_to_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "big", "running")  # by a learner that is no more
    widths = []
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["why", str(folder)]) == 5
        lines = capsys.readouterr().out.splitlines()
        widths.append(max(len(line) for line in lines if len(line.split()) > 2 and str(folder) not in line))
    assert widths[0] <= 60 < widths[1] <= 100


def test_runs_are_compared_by_their_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make_folder(tmp_path, "a", "finished"), make_folder(tmp_path, "b", "running", slope=0.5)]
    assert main(["runs", "compare", *map(str, folders), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["reward"], first["best_held_out"], first["steps"], first["lag"]) == (1.0, 0.4, 12, 1.5)
    assert (second["reward"], second["best_held_out"], second["state"]) == (0.5, 0.2, "crashed")
    assert (first["tokens"], first["seconds"]) == (12 * 50 * 16, 24.0)
    assert main(["runs", "compare", *map(str, folders)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "a",
        "finished",
        "1",
        "0.400",
        "12",
        "9",
        "600",
        "24s",
        "1.500",
    ]
    assert main(["runs", "compare", str(tmp_path)]) == 2


def test_the_best_of_a_run_is_of_a_validation_that_ranks_its_checkpoint(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "a", "stopped")
    lines = [
        {"step": step, "term": 1, "at": 1.0, "val_rollouts/rewards": mean, "val_rollouts/ranks": ranks}
        for step, mean, ranks in ((6, 0.6, 1.0), (8, 0.9, 0.0))  # 0: of a validation that timed out, the quick answers
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.best_held_out for row in compare([folder])] == [0.6]


def test_curves_of_several_runs_are_one_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make_folder(tmp_path, "a", "finished"), make_folder(tmp_path, "b", "running", slope=0.5)]
    output = tmp_path / "both.png"
    assert main(["plot", *map(str, folders), "-o", str(output)]) == 0
    assert output.stat().st_size > 10_000
    assert "a 12 steps, b 12 steps" in capsys.readouterr().out
    assert main(["plot", *map(str, folders), "--run", "c"]) == 2
