"""Files that a configuration names are looked at before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config.check import check_config
from streamrl.config.files import check_files
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, DataError
from streamrl.ops.cli.main import main

CONFIG = """\
model: {path: model}
data: {train: train.jsonl}
rewards:
  exact: {type: function, target: exact_match}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration all of whose files are there."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").touch()
    (tmp_path / "train.jsonl").write_text('{"text": "2+3=", "answer": "5"}\n')
    path = tmp_path / "x.yaml"
    path.write_text(CONFIG)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    try:
        check_files(load_config(path, overrides).config)
    except DataError as error:
        return str(error).splitlines()
    return []


def test_files_that_are_there_are_good(config: Path) -> None:
    assert problems(config) == []


def test_a_wrong_dataset_path_is_named(config: Path) -> None:
    [problem] = problems(config, "data.train=nowhere.jsonl")

    assert "data.train" in problem
    assert "nowhere.jsonl" in problem


def test_a_malformed_line_is_told_with_file_and_line(config: Path) -> None:
    Path("train.jsonl").write_text('{"text": "a"}\n{"text": \n')

    [problem] = problems(config)

    assert problem.startswith("train.jsonl:2: ")


def test_malformed_lines_may_be_skipped_where_the_configuration_says_so(config: Path) -> None:
    Path("train.jsonl").write_text('{"text": "a"}\n{"text": \n')

    assert problems(config, "data.malformed=skip") == []


def test_a_template_whose_braces_may_be_latex_or_a_column_is_refused(config: Path) -> None:
    written = r"data.train={path: train.jsonl, prompt: '{text} in \boxed%s'}"

    with pytest.raises(ConfigError) as refused:
        check_config(load_config(config, [written % "{answer}"]).config)

    assert r"write \boxed{{answer}} for these very characters, \boxed{{{answer}}} for the column" in str(refused.value)
    assert problems(config, written % "{{answer}}") == problems(config, written % "{{{answer}}}") == []


@pytest.mark.parametrize(
    "prompt", ['Answer as {"a": {"b": 1}}. {text}', '{"a": {"b": {text}}}', r"\boxed{\text{...}} {text}"]
)
def test_a_template_whose_double_braces_are_not_in_pairs_is_refused(config: Path, prompt: str) -> None:
    loaded = load_config(config, [f"data.train={json.dumps({'path': 'train.jsonl', 'prompt': prompt})}"])
    with pytest.raises(ConfigError, match="not in pairs: write each brace twice"):
        check_config(loaded.config)


def test_an_empty_dataset_is_refused(config: Path) -> None:
    Path("train.jsonl").write_text("\n")

    [problem] = problems(config)

    assert "data.train" in problem


def test_each_of_several_datasets_is_looked_for(config: Path) -> None:
    several = "{here: {path: train.jsonl}, there: {path: nowhere.jsonl}}"

    assert problems(config, f"data.train={several}") == [
        "data.train.there.path: no such file: nowhere.jsonl; give the path of a JSONL file of prompts"
    ]


def test_validation_prompts_are_read_too(config: Path) -> None:
    [problem] = problems(config, "data.validation=nowhere.jsonl")

    assert "data.validation" in problem


def test_a_model_folder_without_a_tokenizer_is_refused(config: Path) -> None:
    Path("model/tokenizer.json").unlink()

    [problem] = problems(config)

    assert problem.startswith("model.path = 'model': the folder holds no tokenizer")


def test_a_folder_without_a_model_is_refused(config: Path) -> None:
    Path("model/config.json").unlink()

    assert problems(config) == ["model.path = 'model': the folder holds no model (config.json)"]


def test_a_folder_without_weights_is_refused(config: Path) -> None:
    Path("model/model.safetensors").unlink()
    assert problems(config) == ["model.path = 'model': the folder holds no weights (model.safetensors, ...)"]

    Path("model/pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    [problem] = problems(config)
    assert problem.endswith("pytorch_model.bin is a Git LFS pointer; download the file with `git lfs pull`")


@pytest.mark.parametrize("path", ["nowhere", "./nowhere", "a/b/c", "/a/b", "../b", "~/b", "model/other"])
def test_a_path_that_leads_nowhere_is_refused(config: Path, path: str) -> None:
    [problem] = problems(config, f"model.path={path}")

    assert problem.startswith(f"model.path = {path!r}: there is no such folder, and it is not ")


def test_the_name_of_a_model_on_a_hub_is_left_to_the_hub(config: Path) -> None:
    assert problems(config, "model.path=Qwen/Qwen2.5-1.5B-Instruct") == []


def test_a_folder_with_the_name_of_a_hubs_owner_is_told_as_what_hides_the_hub(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("Qwen").mkdir()
    told = "it is not taken for a model on a hub because the folder Qwen/ is here"

    [problem] = problems(config, "model.path=Qwen/Qwen3-0.6B")

    assert problem.startswith(f"model.path = 'Qwen/Qwen3-0.6B': there is no such folder, and {told}")
    assert "rename" in problem
    for words in (["chat"], ["eval", "--config", "x.yaml"], ["weights", "export", "--to", "made"]):
        assert main([*words, "Qwen/Qwen3-0.6B"]) == 2
        assert told in capsys.readouterr().err


def test_the_reward_model_and_the_files_of_rewards_are_looked_for(config: Path) -> None:
    found = problems(
        config,
        "reward_server.model=nowhere",
        "rewards.f={type: function, target: 'my/rewards.py:score'}",
        "rewards.m={type: http, url: local, token_file: secret}",
    )

    assert [problem.partition(" = ")[0] for problem in found] == [
        "reward_server.model",
        "rewards.f.target",
        "rewards.m.token_file",
    ]
