"""`streamrl config show|check`, as a user calls them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from streamrl.config.load import load_config
from streamrl.ops.cli.configs.starter import is_chat_model
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
    assert capsys.readouterr().out == "x.yaml: good (files not checked)\n"


def test_a_layout_that_the_ranks_of_the_only_machine_do_not_fit_is_refused(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["learner.layout.context=4", "learner.processes=2"]
    assert main(["config", "check", config, "--no-files", *layout]) == 2
    assert "learner.layout.context = 4 does not divide the learner's ranks, 2" in capsys.readouterr().err
    assert main(["config", "check", config, "--no-files", *layout, "redis.url=redis://host:6379"]) == 0, "of several"


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


CASES = [
    ("--reward", "numeric_match"),
    ("--reward", "exact_match", "--text"),
    ("--reward", "rewards.py:score", "--validation", "train.jsonl", "--gpus", "1"),
    ("--reward", "rewards.py:score", "--gpus", "8", "--chat"),
]


@pytest.mark.parametrize("options", CASES)
def test_a_begun_configuration_is_short_explained_and_good(
    config: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rewards.py").write_text("")
    assert main(["config", "init", "mine.yaml", "--model", "./model", "--data", "train.jsonl", *options]) == 0
    assert capsys.readouterr().out == "mine.yaml: written. Then: streamrl config check mine.yaml\n"
    assert main(["config", "check", "mine.yaml", "--no-files"]) == 0
    text = Path("mine.yaml").read_text()
    assert len(text.splitlines()) <= 75
    assert max(map(len, text.splitlines())) <= 120
    settings = [line for line in text.splitlines() if ": " in line and not line.lstrip().startswith("#")]
    assert [line for line in settings if "#" not in line] == []


def test_a_begun_configuration_fits_the_case(config: str) -> None:
    case = ["--model", "a: b/no", "--data", "train.jsonl", "--reward", "numeric_match"]
    assert main(["config", "init", "many gpus.yaml", *case, "--gpus", "4", "--text"]) == 0
    made = load_config("many gpus.yaml").config
    assert (made.name, made.model.path) == ("many-gpus", "a: b/no")
    assert (made.learner.processes, made.worker.count) == (2, 0)
    assert made.sampling.stop == ("\n",)
    assert made.validation.every_steps == 0


def test_a_begun_configuration_leaves_its_dtypes_to_the_machine_that_begins(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ["--model", "./model", "--data", "train.jsonl", "--reward", "exact_match"]
    assert main(["config", "init", "here.yaml", *case]) == 0
    for half, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("streamrl.config.precision.computes_in_bfloat16", lambda half=half: half)
        monkeypatch.setattr("streamrl.config.precision.gpus_here", lambda: ())
        capsys.readouterr()
        assert main(["config", "show", "here.yaml"]) == 0
        [line, _] = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("dtype:")]
        assert line.startswith(f"  dtype: {dtype}  # here.yaml:")
        assert "auto; this CPU " in line


@pytest.mark.parametrize(("stem", "name"), [("_mine", "mine"), ("a" * 70, "a" * 64), ("_", "run")])
def test_a_begun_configuration_is_named_after_any_file(config: str, stem: str, name: str) -> None:
    case = ["--model", "./model", "--data", "train.jsonl", "--reward", "exact_match"]
    assert main(["config", "init", f"{stem}.yaml", *case]) == 0
    assert load_config(f"{stem}.yaml").config.name == name


def test_held_out_answers_end_where_trained_ones_do(config: str) -> None:
    case = ["--model", "./model", "--data", "train.jsonl", "--validation", "train.jsonl", "--reward", "exact_match"]
    assert main(["config", "init", "base.yaml", *case, "--text"]) == 0
    made = load_config("base.yaml").config
    assert made.validation.sampling.stop == made.sampling.stop == ("\n",)


def test_what_init_is_not_told_it_asks(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("./model\ntrain.jsonl\nexact_match\n"))
    assert main(["config", "init", "asked.yaml"]) == 0
    assert load_config("asked.yaml").config.rewards["right"].target == "exact_match"  # type: ignore[union-attr]


def test_init_asks_nothing_where_the_file_exists_or_the_reward_is_unknown(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").touch()
    for words, told in (([], "run.yaml already exists"), (["y.yaml", "--reward", "exact"], "write FILE.py:FUNCTION")):
        monkeypatch.setattr("sys.stdin", io.StringIO("./model\ntrain.jsonl\nexact_match\n"))
        assert main(["config", "init", *words]) == 2
        shown = capsys.readouterr()
        assert told in shown.err
        assert shown.out == ""


def test_init_asks_again_for_a_reward_that_it_does_not_know(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("./model\ntrain.jsonl\nexact\nexact_match\n"))
    assert main(["config", "init", "asked.yaml"]) == 0
    assert load_config("asked.yaml").config.rewards["right"].target == "exact_match"  # type: ignore[union-attr]


def test_init_says_what_to_do_where_nobody_answers(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["config", "init", "asked.yaml"]) == 2
    assert "error: the input ended before a question was answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "reward", "told"),
    [
        ("x.yaml", "exact_match", "x.yaml already exists"),
        ("y.yaml", "regex_format", "write FILE.py:FUNCTION, or one of exact_match"),
        ("y.yaml", "no_function.py:", "rewards.right.target = 'no_function.py:': must be one of"),
        ("y.txt", "exact_match", "must end in .yaml"),
    ],
)
def test_init_overwrites_nothing_and_writes_nothing_that_cannot_run(
    config: str, file: str, reward: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "init", file, "--model", "./model", "--data", "train.jsonl", "--reward", reward]) == 2
    assert told in capsys.readouterr().err
    assert Path("x.yaml").read_text() == CONFIG
    assert not Path("y.yaml").exists()


def test_a_folder_with_a_chat_template_is_a_chat_model(tmp_path: Path) -> None:
    assert is_chat_model("OWNER/NAME")
    assert not is_chat_model(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert is_chat_model(str(tmp_path))
