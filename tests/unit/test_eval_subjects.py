"""What runs must share so that their evaluations say something about each other."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.ops.cli.models.eval_subjects import EvalSubject, find_subjects, refuse_other_scoring


@pytest.mark.parametrize(
    ("update", "key"),
    [
        ({"data": {"validation": "b.jsonl"}}, "data.validation"),
        ({"validation": {"sampling": {"num_samples": 2, "temperature": 1.0}}}, "validation.sampling.num_samples"),
        ({"validation": {"every_steps": 3}}, ""),
        ({"optimizer": {"lr": 1e-3}, "sampling": {"max_tokens": 9}}, ""),
        ({"rewards": {"r": {"type": "http", "url": "http://other:1/score"}}}, ""),
        ({"data": {"overlong": "truncate"}}, "data.overlong"),
        ({"reward_server": {"model": "another"}}, "reward_server.model"),
        ({"reward_server": {"model": "rm", "port": 9}}, ""),
    ],
)
def test_what_two_runs_must_share_to_be_compared(update: dict[str, Any], key: str) -> None:
    fields: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": "t.jsonl", "validation": "a.jsonl"},
        "rewards": {"r": {"type": "http", "url": "http://one:1/score"}},
        "reward_server": {"model": "rm"},
    }
    changed = {**fields, **update, "data": fields["data"] | update.get("data", {})}
    one, other = (
        EvalSubject(name="a run", config=schema.Config.model_validate(each), checkpoint=None)
        for each in (fields, changed)
    )
    with pytest.raises(ConfigError, match=f"differ in {key}") if key else nullcontext():
        refuse_other_scoring(one, other)


def test_runs_of_other_reward_models_are_compared_by_one_server() -> None:
    fields: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    one, other = (
        EvalSubject(
            name="a run",
            config=schema.Config.model_validate({**fields, "reward_server": {"model": model}}),
            checkpoint=None,
        )
        for model in ("a", "b")
    )
    refuse_other_scoring(one, other, local_reward_url="http://rm:5555")
    with pytest.raises(ConfigError, match=r"reward_server\.model"):
        refuse_other_scoring(one, other)


def test_settings_with_a_dash_in_a_name_are_no_models(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: m}\ndata: {train: t.jsonl, validation: {gsm-8k: {path: a.jsonl}}}\n"
        "rewards: {my-judge: {type: function, target: exact_match}}\n"
    )
    settings = ["rewards.my-judge.weight=0.5", "data.validation.gsm-8k.path=data/b.jsonl"]

    [subject] = find_subjects(["owner/model", *settings], file, [], local_reward_url=None)

    assert subject.name == "owner/model"
    assert subject.config.rewards["my-judge"].weight == 0.5
    assert [one.dataset.path for one in subject.config.data.validation_sets()] == ["data/b.jsonl"]
