"""A resolved configuration as text gives the same configuration again."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import Loaded, config_from_json, dump_config, load_config
from streamrl.errors import ConfigError

AWKWARD = """\
name: "007"
dir: some/where
model: {path: "no", lora: {rank: 4}}
data: {train: "a: b # c.jsonl"}
sampling: {stop: ["\\n", "null", ": ", "1e-6", "ü", "\\u0007", "'\\""]}
rewards:
  exact: {type: function, target: exact_match, options: {a: "1", b: 1, c: 1.0, d: true, e: "true"}}
  model: {type: http, url: "http://host:1"}
optimizer: {lr: 1e-6, eps: 1e-12}
worker: {engine_args: {x: 1e30}}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    path = tmp_path / "x.yaml"
    path.write_text(AWKWARD)
    return load_config(path, ["seed=7"])


@pytest.mark.parametrize("annotated", [False, True])
def test_the_yaml_of_a_configuration_loads_to_the_same(loaded: Loaded, tmp_path: Path, annotated: bool) -> None:
    path = tmp_path / "resolved.yaml"

    path.write_text(dump_config(loaded.config, loaded.origin if annotated else None))

    again = load_config(path).config
    assert again == loaded.config
    assert again.model_dump_json() == loaded.config.model_dump_json()  # which also tells 1 from 1.0 and from true


def test_datasets_keep_their_names_and_their_order(tmp_path: Path) -> None:
    path, resolved = tmp_path / "x.yaml", tmp_path / "resolved.yaml"
    path.write_text(AWKWARD.replace('"a: b # c.jsonl"', '{z: {path: z}, "no": {path: n, weight: 2}, a: {path: a}}'))
    config = load_config(path).config

    resolved.write_text(dump_config(config))

    for again in (load_config(resolved).config, config_from_json(config.model_dump_json())):
        assert [(one.name, one.dataset.weight) for one in again.data.train_sets()] == [
            ("z", 1.0),
            ("no", 2.0),
            ("a", 1.0),
        ]


def test_the_json_of_a_configuration_loads_to_the_same(loaded: Loaded) -> None:
    assert config_from_json(loaded.config.model_dump_json()) == loaded.config


def test_a_shown_configuration_tells_where_each_setting_was_written(loaded: Loaded, tmp_path: Path) -> None:
    lines = dump_config(loaded.config, loaded.origin).splitlines()

    assert f"  lr: 1.0e-06  # {tmp_path}/x.yaml:9" in lines
    assert "seed: 7  # override 'seed=7'" in lines
    assert "  min_lr: 9.0e-08" in lines


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x"}', '{"nonsense": 1}'])
def test_json_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="does not fit this version of streamrl"):
        config_from_json(text)


def test_json_is_as_strict_as_a_file(loaded: Loaded) -> None:
    with pytest.raises(ConfigError, match="seed"):
        config_from_json(loaded.config.model_dump_json().replace('"seed":7', '"seed":"7"'))
