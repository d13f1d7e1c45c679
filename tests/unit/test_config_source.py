"""YAML as configurations use it: the scalars of YAML 1.2, and a place for every value."""

from __future__ import annotations

import math

import pytest

from streamrl.config.source import Node, parse
from streamrl.errors import ConfigError


def read(text: str) -> Node:
    return parse(text, name="x.yaml", numbered=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-1E3", -1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("+7", 7),
        ("007", 7),
        ("9" * 5000, math.inf),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("[1, null]", [1, None]),
        ("{a: {b: [x]}}", {"a": {"b": ["x"]}}),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    assert read(f"key: {text}").plain() == {"key": value}


@pytest.mark.parametrize("text", ["no", "on", "1:30:00", "00:04:00:00", "2024-01-01", "0x10", "1_000", "e5", "1e"])
def test_what_yaml_1_1_would_twist_stays_text(text: str) -> None:
    assert read(f"key: {text}").plain() == {"key": text}


def test_nan_is_a_number_so_that_the_schema_can_refuse_it() -> None:
    assert math.isnan(read("key: .nan").plain()["key"])


def test_every_value_knows_its_line() -> None:
    tree = read("a: 1\n\n# a comment\nb:\n  c: 2\n  d:\n    e: [3]\n")

    assert [node.origin for path in (["a"], ["b"], ["b", "c"], ["b", "d", "e"]) if (node := tree.find(*path))] == [
        "x.yaml:1",
        "x.yaml:4",
        "x.yaml:5",
        "x.yaml:7",
    ]
    assert tree.find("b", "nowhere") is None
    assert tree.find("a", "deeper") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3: duplicate key 'a' (first at x.yaml:1)"),
        ("a: &x 1", "x.yaml:1: not valid YAML: anchors and aliases are not supported"),
        ("a: *x", "x.yaml:1: not valid YAML: anchors and aliases are not supported"),
        ("a:\n  b: !!python/name:os.system x", "x.yaml:2: the tag"),
        ("a: !mine {b: 1}", "x.yaml:1: the tag '!mine'"),
        ("a: 1\nb: [1", "x.yaml:2: not valid YAML"),
        ("a: b: c", "x.yaml:1: not valid YAML"),
        ("a: 1\n--- \nb: 2", "x.yaml:2: not valid YAML"),
        ("a: \0", "x.yaml: not valid YAML"),
        ("? [1]\n: 2", "x.yaml:1: a key must be a name"),
        ("true: 1", "x.yaml:1: a key must be a name, not 'true'"),
    ],
)
def test_what_is_not_plain_data_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_what_nests_too_deep_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^x.yaml: not a configuration: lists or maps are nested too deeply$"):
        read("key: " + 2000 * "[" + 2000 * "]")


def test_what_json_escapes_as_two_halves_is_one_character_and_a_half_is_refused() -> None:
    assert read('"\\ud83d\\ude00": "a\\ud83d\\ude00"').plain() == {"😀": "a😀"}
    for text, line in (('a: 1\nb: "x\\ud83d"', 2), ('{"\\ude00": 1}', 1)):
        with pytest.raises(ConfigError, match=rf"^x.yaml:{line}: '.*' is not text: it contains half of a surrogate"):
            read(text)
