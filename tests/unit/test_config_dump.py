"""A resolved configuration as text gives the same configuration again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import Loaded, config_from_json, dump_config, load_config
from streamrl.errors import ConfigError
from streamrl.ops.monitor.remains import read_config

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
WORDS = """
08 0829 08540 007 0x10 0xff 0o17 0b11 +1 -1 1_000 1e5 1E5 5e06311 .5e3 1.5 1. .5 +.5 1e 1:30 1:30:00 1.5:30 .inf -.INF
.nan NaN inf 99999999999999999999 null Null ~ true TRUE True false yes No on OFF y n 2024-01-01 2024-01-01T00:00:00Z
--- ... - ? : | > = << # % @ ` ! & * [ ] { } ' " , !x &x *x %x [x {x 'x "x -x ?x :x x: x# #x \\d \\u0041 é 😀 文
"""
PHRASES = """ x
x\x20
x: y
x # y
- x
? x
--- x
a, b
{a: b}
'x' y
#### ?(-?[\\d,.]+)
"""  # and nothing
CONTROLS = (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x2028, 0x2029, 0xFEFF, 0xFFFD, 0xFFFE, 0xFFFF)
AROUND = ("{}", "a{}b", "😀{}")
TEXTS = [*WORDS.split(), *PHRASES.split("\n"), "x" * 500, *(text.format(chr(c)) for c in CONTROLS for text in AROUND)]


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


def test_text_stays_that_text_however_it_is_written_and_read(tmp_path: Path) -> None:
    """As a scalar, in a list, as a key and under one: in a program's map, and in the YAML of a configuration."""
    options = {f"option{number}": text for number, text in enumerate(TEXTS)}
    given: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": {"hub": "a/b", "revision": "5e06311"}},
        "rewards": {"exact": {"type": "function", "target": "exact_match", "options": options}},
        "sampling": {"stop": TEXTS},
        "worker": {"engine_args": {"map": dict(zip(TEXTS, TEXTS, strict=True)), "list": [dict.fromkeys(TEXTS, 1)]}},
    }
    path = tmp_path / "config.yaml"

    loaded = load_config(given)
    path.write_text(dump_config(loaded.config, loaded.origin), encoding="utf-8")

    configs = [config.model_dump(mode="json") for config in (loaded.config, load_config(path).config)]
    for found in (*configs, read_config(tmp_path)):
        args = found["worker"]["engine_args"]
        assert changed(found["sampling"]["stop"]) == []
        assert changed(found["rewards"]["exact"]["options"].values()) == []
        assert changed(args["map"]) == changed(args["map"].values()) == changed(args["list"][0]) == []
        assert found["data"]["train"]["revision"] == "5e06311"


def changed(found: Iterable[object]) -> list[tuple[str, object]]:
    return [(text, again) for text, again in zip(TEXTS, found, strict=True) if text != again]


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
