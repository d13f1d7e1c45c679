"""`streamrl config show|check`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.ops.cli.main import main

CONFIG = """\
model: {path: model}
data: {train: train.jsonl}
rewards:
  exact: {type: function, target: exact_match}
validation: {every_steps: 0}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/tokenizer.json").write_text("{}")
    Path("model/model.safetensors").touch()
    Path("train.jsonl").write_text('{"text": "2+3="}\n')
    Path("x.yaml").write_text(CONFIG)
    return "x.yaml"


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["sed=3"], "error: override 'sed=3': unknown key 'sed'; did you mean 'seed'?\n"),
        (["sampling.num_samples=1"], "error: override 'sampling.num_samples=1': sampling.num_samples = 1: "),
        (["data.train=nowhere.jsonl"], "error: data.train: "),
    ],
)
def test_mistakes_exit_with_2_and_one_line(
    config: str, overrides: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", config, *overrides]) == 2

    captured = capsys.readouterr()
    assert captured.err.startswith(shown)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_file_exits_with_2(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "y.yaml"]) == 2
    assert capsys.readouterr().err == "error: there is no configuration file y.yaml; did you mean x.yaml?\n"


def test_settings_can_be_checked_where_the_files_are_not(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", config, "data.train=nowhere.jsonl", "--no-files"]) == 0
    assert capsys.readouterr().out == "x.yaml: good (files were not looked at)\n"


def test_show_prints_every_setting_and_where_it_was_written(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", config, "seed=3"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "seed: 3  # override 'seed=3'" in lines
    assert "  path: model  # x.yaml:1" in lines
    assert "  lr: 9.0e-07" in lines


def test_show_prints_json_for_programs(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", config, "--json", "seed=3"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == 3
    assert shown["optimizer"]["lr"] == 9e-7


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_is_shown_holds_no_password(config: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    urls = [
        "redis.url=redis://user:secret@host:1",
        "rewards.m={type: http, url: 'http://h:1', replicas: ['http://u:secret@h']}",
    ]

    assert main(["config", "show", config, *urls, *options]) == 0

    shown = capsys.readouterr().out
    assert "redis://user:***@host:1" in shown
    assert "http://u:***@h" in shown
    assert "secret" not in shown
    assert not options or json.loads(shown)["rewards"]["m"]["url"] == "http://h:1"
