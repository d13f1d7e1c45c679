"""From files to a configuration: what extends what, shipped configurations, and files that are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.config.load import load_config
from streamrl.config.schema import HttpReward
from tests.config_world import BASE, SHIPPED, error_of


def test_a_file_overrides_what_it_extends_and_the_command_line_overrides_both(config_folder: Path) -> None:
    (config_folder / "sub").mkdir()
    (config_folder / "sub" / "mine.yaml").write_text(
        "extends: ../base.yaml\nmodel:\n  dtype: float32\noptimizer: {lr: 1e-5}\n"
    )

    loaded = load_config("sub/mine.yaml", ["optimizer.lr=1e-6", "lag.max_steps=0"])

    assert loaded.config.model.path == "base"
    assert loaded.config.model.dtype == "float32"
    assert loaded.config.optimizer.lr == 1e-6
    assert loaded.config.lag.max_steps == 0
    assert loaded.origin("model.path") == "base.yaml:1"
    assert loaded.origin("model.dtype") == "sub/mine.yaml:3"
    assert loaded.origin("optimizer.lr") == "override 'optimizer.lr=1e-6'"
    assert loaded.origin("seed") is None


def test_lists_are_replaced_and_not_merged(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text("extends: base.yaml\nsampling: {stop: [a, b]}\n")

    assert load_config("mine.yaml", ["sampling.stop=[c]"]).config.sampling.stop == ("c",)


def test_null_takes_an_inherited_map_away(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text(
        "extends: base.yaml\nmodel: {lora: {rank: 8}}\nrewards:\n  exact: null\n  m: {type: http, url: 'http://a:1'}\n"
    )

    config = load_config("mine.yaml", ["model.lora=null"]).config

    assert config.model.lora is None
    assert isinstance(config.rewards["m"], HttpReward)
    assert list(config.rewards) == ["m"]


def test_extending_in_a_circle_is_refused(config_folder: Path) -> None:
    (config_folder / "a.yaml").write_text("extends: b.yaml\n")
    (config_folder / "b.yaml").write_text("extends: a.yaml\n")

    assert error_of("a.yaml") == "b.yaml:1: extends in a circle: a.yaml -> b.yaml -> a.yaml"


def test_a_missing_base_is_named_with_the_line_that_asks_for_it(config_folder: Path) -> None:
    (config_folder / "a.yaml").write_text("name: a\nextends: nowhere.yaml\n")

    assert error_of("a.yaml") == f"a.yaml:2: extends = 'nowhere.yaml': there is no file nowhere.yaml; {SHIPPED}"


def test_a_file_is_not_told_to_extend_itself(config_folder: Path) -> None:
    (config_folder / "case.yaml").write_text("extends: ./ase.yaml\n")

    assert error_of("case.yaml").endswith("there is no file ase.yaml; did you mean base.yaml?")


def test_a_list_of_files_is_laid_one_on_another(config_folder: Path) -> None:
    (config_folder / "a.yaml").write_text("seed: 1\nlag: {max_steps: 1}\n")
    (config_folder / "b.yaml").write_text("seed: 2\n")
    (config_folder / "mine.yaml").write_text("extends: [base.yaml, a.yaml, b.yaml]\ntraining: {max_steps: 3}\n")

    config = load_config("mine.yaml").config

    assert (config.model.path, config.lag.max_steps, config.seed, config.training.max_steps) == ("base", 1, 2, 3)


def test_extends_on_the_command_line_lays_a_file_on_all_before_it(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text("extends: base.yaml\nalgorithm: {loss: tis, top_n: 3}\n")

    loaded = load_config(
        "mine.yaml", ["algorithm.loss_mean=token", "extends=recipes/grpo.yaml", "sampling.num_samples=2"]
    )

    assert (loaded.config.algorithm.loss, loaded.config.algorithm.loss_mean) == ("ppo", "sequence")
    assert (loaded.config.algorithm.top_n, loaded.config.sampling.num_samples) == (3, 2)
    assert str(loaded.origin("algorithm.loss")).endswith("recipes/grpo.yaml:11")


@pytest.mark.parametrize("wrong", ["3", "[]", "[base.yaml, 3]", "{a: b}"])
def test_extends_takes_names_of_files(config_folder: Path, wrong: str) -> None:
    (config_folder / "a.yaml").write_text(f"extends: {wrong}\n")

    assert error_of("a.yaml").endswith(": must be a file name, or a list of file names")


def test_a_missing_file_is_named_with_the_nearest_one(config_folder: Path) -> None:
    assert error_of("bse.yaml") == "there is no configuration file bse.yaml; did you mean base.yaml?"
    assert error_of("nowhere/else.yaml") == f"there is no configuration file nowhere/else.yaml; {SHIPPED}"


@pytest.mark.parametrize("name", ["reinforce.yaml", "conf/reinforce.yaml"])
def test_a_shipped_configuration_is_found_by_its_name_from_any_folder(config_folder: Path, name: str) -> None:
    (config_folder / "mine").mkdir()
    (config_folder / "mine" / "own.yaml").write_text(f"extends: {name}\nseed: 7\n")

    config = load_config("mine/own.yaml").config

    assert config.seed == 7
    assert config == load_config(name, ["seed=7"]).config
    assert load_config("gpu_qwen_7b_lora.yaml").config.model.lora is not None  # by way of two others


def test_an_own_file_wins_over_a_shipped_one_of_its_name(config_folder: Path) -> None:
    (config_folder / "reinforce.yaml").write_text(BASE)
    (config_folder / "own.yaml").write_text("extends: reinforce.yaml\n")

    assert load_config("reinforce.yaml").config.model.path == "base"
    assert load_config("own.yaml").config.model.path == "base"
    assert load_config("conf/reinforce.yaml").config.model.path != "base"


def test_a_shipped_setting_says_the_file_where_it_was_written(config_folder: Path) -> None:
    (config_folder / "own.yaml").write_text("extends: reinforce.yaml\nseed: 7\n")
    loaded = load_config("own.yaml")

    assert loaded.origin("seed") == "own.yaml:2"
    assert re.fullmatch(r"/.*/conf/reinforce\.yaml:\d+", loaded.origin("model.path") or "")


def test_a_name_in_another_folder_is_not_a_shipped_one(config_folder: Path) -> None:
    assert error_of("other/reinforce.yaml").startswith("there is no configuration file other/reinforce.yaml; ")


def test_a_folder_an_empty_file_and_a_list_are_no_configuration(config_folder: Path) -> None:
    (config_folder / "empty.yaml").write_text("# nothing\n")
    (config_folder / "list.yaml").write_text("- 1\n")
    (config_folder / "bytes.yaml").write_bytes(b"name: \xff\n")

    assert error_of(".") == "cannot read the configuration file .: Is a directory"
    assert error_of("empty.yaml") == "empty.yaml: a configuration must be a map of settings; it is empty"
    assert error_of("list.yaml") == "list.yaml: a configuration must be a map of settings; it holds [1]"
    assert error_of("bytes.yaml") == "bytes.yaml: not UTF-8 text: invalid start byte at byte 6"


def test_code_of_a_recipe_is_found_in_the_working_directory_and_then_beside_the_file_that_names_it(
    config_folder: Path,
) -> None:
    (config_folder / "sub").mkdir()
    (config_folder / "sub" / "mine.yaml").write_text(
        "extends: ../base.yaml\nalgorithm: {loss: 'own.py:loss', advantages: 'own.py:advantages', loss_args: {x: 1}}\n"
    )

    def named() -> tuple[str, str]:
        loaded = load_config("sub/mine.yaml")
        assert loaded.origin("algorithm.loss") == "sub/mine.yaml:2"
        assert loaded.config.algorithm.loss_args == {"x": 1}
        return loaded.config.algorithm.loss, loaded.config.algorithm.advantages

    assert named() == ("own.py:loss", "own.py:advantages"), "where it is nowhere, it stays as it was written"
    (config_folder / "sub" / "own.py").touch()
    assert named() == ("sub/own.py:loss", "sub/own.py:advantages")
    (config_folder / "own.py").touch()
    assert named() == ("own.py:loss", "own.py:advantages")
