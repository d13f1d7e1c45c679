"""Which settings a run may change when it goes on: every one is decided, and refusals say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config import schema
from streamrl.config.changes import changes, check_changes, refusal_of
from streamrl.config.keys import known_keys
from streamrl.errors import ConfigError


def make_config(**sections: Any) -> schema.Config:
    fields: dict[str, Any] = {
        "model": {"path": "models/sft"},
        "data": {"train": "train.jsonl"},
        "rewards": {"exact": {"type": "function", "target": "exact_match"}},
    }
    return schema.Config.model_validate({**fields, **sections})


def refused(**sections: Any) -> list[str]:
    return [change.key for change in changes(make_config(), make_config(**sections)) if change.refusal]


def test_it_is_decided_of_every_setting_whether_it_may_change() -> None:
    for key in known_keys():
        if not any(other.startswith(f"{key}.") for other in known_keys()):
            refusal_of(key)  # raises KeyError for one that nobody has thought of


def test_equal_configurations_have_no_changes() -> None:
    assert changes(make_config(), make_config()) == []


def test_what_changed_is_shown_from_and_to() -> None:
    [change] = changes(make_config(), make_config(optimizer={"lr": 1e-4}))
    assert (str(change), change.refusal) == ("optimizer.lr: 9e-07 -> 0.0001", None)


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"sampling": {"temperature": 0.7}}, ["sampling.temperature"]),
        ({"model": {"path": "models/other"}}, ["model.path"]),
        ({"model": {"path": "models/sft", "lora": {}}}, ["model.lora.rank", "model.lora.alpha", "model.lora.targets"]),
        ({"seed": 5}, ["seed"]),
        ({"data": {"train": "elsewhere.jsonl"}}, []),
        ({"data": {"train": {"a": {"path": "train.jsonl", "weight": 2.0}}}}, ["data.train.a.weight"]),
        (
            {"rewards": {"exact": {"type": "function", "target": "exact_match", "weight": 2.0}}},
            ["rewards.exact.weight"],
        ),
        ({"algorithm": {"name": "rejection_sampling"}}, ["algorithm.name"]),
        ({"optimizer": {"lr": 1.0}, "lag": {"max_steps": 9}, "checkpoint": {"every_steps": 3}}, []),
        ({"rewards": {"exact": {"type": "function", "target": "exact_match", "timeout_s": 99.0}}}, []),
        ({"redis": {"url": "redis://elsewhere:6379"}, "dir": "/elsewhere"}, []),
    ],
)
def test_what_decided_the_groups_under_way_may_not_change(sections: dict[str, Any], keys: list[str]) -> None:
    assert refused(**sections) == keys


def test_a_reward_that_came_or_went_is_refused() -> None:
    more = {"exact": {"type": "function", "target": "exact_match"}, "more": {"type": "function", "target": "length"}}
    before, after = make_config(), make_config(rewards=more)
    assert any(change.refusal for change in changes(before, after))
    assert any(change.refusal for change in changes(after, before))


def test_a_refusal_names_every_setting_and_the_way_out() -> None:
    found = changes(make_config(), make_config(seed=5, sampling={"temperature": 0.7}))
    with pytest.raises(ConfigError) as caught:
        check_changes(found, folder="runs/run")
    told = str(caught.value)
    assert "seed: 1234 -> 5: tickets of this run" in told
    assert "sampling.temperature: 1.0 -> 0.7: groups under way were sampled with it" in told
    assert "--fork runs/run" in told
