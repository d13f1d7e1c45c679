"""Settings from a command line or a program: a value is what it looks like, and no text is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config.load import as_overrides, config_from_json, load_config
from streamrl.config.schema import FunctionReward
from tests.config_world import error_of


def test_one_changed_setting_of_validation_sampling_leaves_its_other_defaults(config_folder: Path) -> None:
    sampling = load_config("base.yaml", ["validation.sampling.max_tokens=7"]).config.validation.sampling

    assert (sampling.max_tokens, sampling.num_samples, sampling.greedy) == (7, 1, True)


def test_arguments_of_the_engine_are_maps_and_lists_too_and_merge_by_key(config_folder: Path) -> None:
    overrides = [
        "worker.engine_args.compilation_config={mode: 3, cudagraph_capture_sizes: [1, 2]}",
        "worker.engine_args.compilation_config.mode=0",
        "worker.engine_args.speculative_config=null",
    ]
    config = load_config(config_folder / "base.yaml", overrides).config
    expected = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 2]}, "speculative_config": None}
    assert config.worker.engine_args == expected
    assert config_from_json(config.model_dump_json()).worker.engine_args == expected


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("#### ?(-?[\\d,.]+)", "#### ?(-?[\\d,.]+)"),
        ("Prefer answer #1", "Prefer answer #1"),
        ("Prefer: answer #1", "Prefer: answer #1"),
        ("5 # or more", "5 # or more"),
        ("'5' # or more", "'5' # or more"),
        ("---", "---"),
        ("--- a", "--- a"),
        ("|", "|"),
        (">", ">"),
        ("-", "-"),
        ("?", "?"),
        ("one\n  two", "one\n  two"),
        (" a ", "a"),
        ("'#1'", "#1"),
        ('" a "', " a "),
        ("'5'", "5"),
        ("5", 5),
        ("1e3", 1000.0),
        ("true", True),
    ],
)
def test_a_value_on_the_command_line_is_not_cut(config_folder: Path, written: str, value: object) -> None:
    config = load_config("base.yaml", [f"rewards.exact.options.x={written}"]).config

    assert isinstance(config.rewards["exact"], FunctionReward)
    assert config.rewards["exact"].options == {"x": value}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[0-9]+", "not valid YAML: expected '<document start>'"),
        ("{question} Think.", "not valid YAML: expected '<document start>'"),
        ("{question}", "{question} is a map without values"),
        ("@x", "not valid YAML: while scanning for the next token"),
        ("`x`", "not valid YAML: while scanning for the next token"),
        ('"Q: {q}" Think.', "not valid YAML: expected '<document start>'"),
        ("*.jsonl", "not valid YAML: while scanning an alias"),
        ("!important", "the tag '!important' is not supported"),
    ],
)
def test_text_that_yaml_takes_for_something_else_is_told_to_need_quotes(
    config_folder: Path, text: str, why: str
) -> None:
    override = f"validation.answer={text}"
    message = error_of("base.yaml", override)
    assert message.startswith(f"override {override!r}: {why}")
    assert message.endswith("; if it is meant as text, it needs quotes inside those of the shell: KEY='\"...\"'")
    quoted = f"validation.answer={json.dumps(text)}"
    assert load_config("base.yaml", [quoted]).config.validation.answer == text


@pytest.mark.parametrize("nothing", ["", "~", "null", "Null", "NULL", " null "])
def test_a_value_on_the_command_line_may_be_nothing(config_folder: Path, nothing: str) -> None:
    assert load_config("base.yaml", [f"validation.answer={nothing}"]).config.validation.answer is None


def test_a_program_sets_any_text(config_folder: Path) -> None:
    """As one setting, and in a map."""
    texts = {"a": "#### ?(-?[\\d,.]+)", "b": "Prefer answer #1", "c": " '5' # or more", "d": "1e5", "e": "---", "f": ""}
    settings = {f"rewards.exact.options.{name}": text for name, text in texts.items()}

    for overrides in (settings, {"rewards": {"exact": {"options": texts}}}):
        config = load_config("base.yaml", as_overrides(overrides)).config
        assert isinstance(config.rewards["exact"], FunctionReward)
        assert config.rewards["exact"].options == texts


@pytest.mark.parametrize("override", ["foo", "=1", "a..b=1", ".a=1"])
def test_an_override_that_is_no_assignment_shows_how_to_write_one(config_folder: Path, override: str) -> None:
    assert error_of("base.yaml", override) == f"override {override!r}: write KEY.SUB=VALUE, such as optimizer.lr=1e-4"


def test_one_dataset_of_several_may_be_overridden(config_folder: Path) -> None:
    (config_folder / "mine.yaml").write_text(
        "extends: base.yaml\ndata: {train: {a: {path: a}, b: {path: b, weight: 2}}}\n"
    )

    config = load_config("mine.yaml", ["data.train.a.weight=0.5"]).config

    assert [(one.key, one.name, one.dataset.path, one.dataset.weight) for one in config.data.train_sets()] == [
        ("data.train.a.path", "a", "a", 0.5),
        ("data.train.b.path", "b", "b", 2.0),
    ]


def test_integers_are_numbers_where_numbers_are_due(config_folder: Path) -> None:
    assert (
        load_config("base.yaml", ["sampling.temperature=1", "worker.engine_args.n=1"]).config.sampling.temperature
        == 1.0
    )


def test_an_override_may_hold_a_whole_map(config_folder: Path) -> None:
    source = {"type": "http", "url": "http://host:1"}

    config = load_config("base.yaml", [f"rewards.other={json.dumps(source)}"]).config

    assert list(config.rewards) == ["exact", "other"]
