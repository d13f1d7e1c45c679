"""The quickstart's task and data: checkable, made from the seed, and held out what is said to be."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest

from streamrl.demos.quickstart import (
    FALLING,
    RISING,
    Example,
    demonstrate,
    examples,
    overrides,
    solve,
    spoil,
    write_data,
)


def many(count: int = 2000, seed: int = 1) -> list[Example]:
    return list(islice(examples(random.Random(seed)), count))


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, seed=7)
    return folder


def test_the_sign_says_which_way_to_sort() -> None:
    assert solve("52918", RISING) == "12589"
    assert solve("52918", FALLING) == "98521"


def test_prompts_differ_in_length_and_sign() -> None:
    found = many()

    assert {len(example.prompt) for example in found} == {4, 5, 6, 7, 8, 9}
    assert {example.prompt[-1] for example in found} == {RISING, FALLING}


def test_demonstrations_are_right_about_rising_and_mostly_careless_about_falling_order() -> None:
    rng = random.Random(2)
    found = [(example, demonstrate(example, rng)) for example in many()]

    assert all(shown == one.answer for one, shown in found if one.prompt.endswith(RISING))
    falling = [shown == one.answer for one, shown in found if one.prompt.endswith(FALLING)]
    assert 0.2 < sum(falling) / len(falling) < 0.5


def test_a_spoilt_answer_is_never_right() -> None:
    rng = random.Random(3)
    assert all(spoil(example, rng) != example.answer for example in many())


def test_what_is_held_out_is_nowhere_else(data: Path) -> None:
    held_out = {row["prompt"] for row in rows(data / "validation.jsonl")}

    assert len(held_out) > 350
    for name in ("train", "demonstrations", "pairs"):
        assert held_out.isdisjoint(row["prompt"] for row in rows(data / f"{name}.jsonl"))


def test_the_seed_decides_the_data(data: Path, tmp_path: Path) -> None:
    write_data(tmp_path / "same", seed=7)
    write_data(tmp_path / "other", seed=8)

    for file in data.iterdir():
        assert file.read_bytes() == (tmp_path / "same" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "other" / file.name).read_bytes()


def test_the_run_gets_the_paths_of_what_was_made_and_the_reward_models_scale(tmp_path: Path) -> None:
    (tmp_path / "reward-model").mkdir()
    (tmp_path / "reward-model" / "reward_summary.json").write_text('{"reward_mean": -1.5, "reward_std": 2.0}')

    settings = dict(text.split("=", 1) for text in overrides(tmp_path))

    assert settings["model.path"] == json.dumps(str(tmp_path / "sft"))
    assert settings["reward_server.reward_mean"] == "-1.5"
