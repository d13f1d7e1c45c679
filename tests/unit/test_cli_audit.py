from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config.load import dump_config
from streamrl.learner.checkpoints.resume import REPLAY
from streamrl.ops.cli.main import main
from tests.feed_world import make_config
from tests.run_folder import RunFolder, clean_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return clean_folder(tmp_path / "run")


def test_a_clean_run_exits_with_0_and_shows_the_sums(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run run: e000002-s00000020, term 2, the folder alone"
    assert [line.split()[:2] for line in lines[2:9]] == [
        ["issued", "12"],
        ["trained", "8"],
        ["dropped", "1"],
        ["dead", "1"],
        ["outstanding", "2"],
        ["lost", "0"],
        ["twice", "0"],
    ]
    assert "(stale 1)" in lines[4]
    assert "not checked without Redis: whether 2 outstanding tickets are in it" in lines[-2]
    assert lines[-1] == "clean: every ticket is accounted for"


def test_json_is_one_object(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(folder.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["trained"], told["clean"], told["redis"]) == ("run", 8, True, None)


def test_help_documents_every_field_of_the_json(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    main(["audit", str(folder.path), "--json"])
    told = json.loads(capsys.readouterr().out)
    main(["audit", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in told if name not in shown] == []


def test_lost_and_twice_exit_with_1_and_name_the_tickets(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.journal("e000002-s00000020", (11, "trained", [(4, 8)]), (20, "dead", [(8, 9)]), after="e000001-s00000010")
    assert main(["audit", str(folder.path)]) == 1
    shown = capsys.readouterr().out
    assert "lost                   1   (tickets 10)" in shown
    assert "twice                  1   (tickets 4)" in shown
    assert shown.splitlines()[-1] == "NOT CLEAN"


def test_many_wrong_tickets_are_shown_in_part(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.checkpoint("e000002-s00000020", issued=40, ended=39)
    assert main(["audit", str(folder.path)]) == 1
    assert ", ...)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["nowhere"], "it does not exist"),
        ([], "give the folder of a run, or --redis URL (or STREAMRL_REDIS) and --run NAME"),
        (
            ["--redis", "redis://localhost"],
            "name the run in that Redis with --run NAME",
        ),
        (["--redis", "nonsense", "--run", "x"], "must be redis://host:port"),
        (["--redis", "unix:///none.sock", "--run", "x"], "Redis at unix:///none.sock does not answer"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(
    arguments: list[str],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert shown in line


def test_of_a_run_whose_embedded_server_has_ended_the_folder_is_audited(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / "config.yaml").write_text(dump_config(make_config()))
    assert main(["audit", str(folder.path)]) == 0
    assert "the folder alone" in capsys.readouterr().out
    assert not (folder.path / "redis").exists(), "nothing is started"


def test_a_replay_has_no_server_that_could_be_audited(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.path / "config.yaml").write_text(dump_config(make_config(redis={"url": "unix:///none.sock"})))
    (folder.path / REPLAY).touch()
    assert main(["audit", str(folder.path)]) == 0
    assert "not checked without Redis" in capsys.readouterr().out


def test_a_server_of_ones_own_must_answer_unless_the_folder_alone_is_asked_for(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(redis={"url": "unix:///none.sock"})
    (folder.path / "config.yaml").write_text(dump_config(config))
    assert main(["audit", str(folder.path)]) == 2
    assert "; --folder-only audits without it" in capsys.readouterr().err
    assert main(["audit", str(folder.path), "--folder-only"]) == 0
