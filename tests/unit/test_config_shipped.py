"""The configurations in `conf/`: all load, none contradicts itself, and `reinforce.yaml` is complete and true."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.check import check_config
from streamrl.config.explain import ANY_NAME, known_keys
from streamrl.config.load import load_config
from streamrl.config.schema import (
    Config,
    Environment,
    FunctionReward,
    HttpReward,
    JudgeReward,
    Lora,
    OwnRewardServer,
    Teacher,
    Wandb,
)
from streamrl.config.source import parse

CONF = Path(__file__).parents[2] / "conf"

# What a run cannot be without has no default, and two optional settings are shown switched on.
EXAMPLES = {
    "model.path",
    "data.train",
    "data.train.math.path",
    "data.validation",
    "rewards.model.type",
    "rewards.model.url",
    "rewards.answer.type",
    "rewards.answer.target",
    "rewards.judge.type",
    "rewards.judge.rubric",
    "rewards.judge.judges.big.url",
    "rewards.judge.judges.big.model",
    "reward_server.model",
    "environment.target",
    "teacher.path",
}


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads_and_agrees_with_itself(path: Path) -> None:
    loaded = load_config(path)

    check_config(loaded.config, loaded.origin)


MAPS = {
    "model.lora": Lora(),
    "metrics.wandb": Wandb(),
    "environment": Environment(target="e"),
    "teacher": Teacher(path="t"),
}  # sections that are null by default


def test_the_reference_holds_every_setting() -> None:
    names = re.compile(r"^(rewards|data\.train)\.(model|answer|judge|math)\.")
    written = {
        names.sub(rf"\1.{ANY_NAME}.", key).replace(".judges.big.", f".judges.{ANY_NAME}.") for key in reference()
    }
    # A dataset has the same settings wherever it stands; they are shown once.
    known = {re.sub(r"^data\.(train|validation)\.(NAME\.)?", f"data.train.{ANY_NAME}.", key) for key in known_keys()}

    sections = {key for key in known_keys() if any(other.startswith(f"{key}.") for other in known_keys())}
    assert known - sections - written == set()


def test_the_reference_shows_the_true_defaults() -> None:
    minimal = Config(
        model={"path": "m"},
        data={"train": {"math": {"path": "t"}}},
        rewards={
            "model": HttpReward(type="http", url="http://h"),
            "answer": FunctionReward(type="function", target="f"),
            "judge": JudgeReward(type="judge", judges={"big": {"url": "u", "model": "m"}}, rubric="r"),
        },
        reward_server=OwnRewardServer(model="m"),
    )
    defaults = dict(_leaves(minimal.model_dump(mode="json")))
    for key, section in MAPS.items():
        del defaults[key]  # null by default; the reference shows what a map would hold
        defaults |= {f"{key}.{name}": value for name, value in section.model_dump(mode="json").items()}

    assert _without_examples(reference()) == _without_examples(defaults)


def reference() -> Mapping[str, Any]:
    """The settings of conf/reinforce.yaml by dotted key, those of maps that are commented out in it too."""
    text = (CONF / "reinforce.yaml").read_text()
    for key in MAPS:
        name = key.rpartition(".")[2]
        assert re.search(rf"(?m)^ *{name}: null ", text), f"{key} must be shown with its default"
        text = re.sub(rf"(?m)^( *{name}: )null ", r"\1", text)
    assert "\n  train: prompts.jsonl " in text, "one file is the rule; a map is shown in comments"
    text = text.replace("\n  train: prompts.jsonl ", "\n  train: ")
    text = text.replace("\n  # judge: ", "\n  judge: ")
    text = re.sub(r"(?m)^    # ( *\w+:)", r"    \1", text)
    return dict(_leaves(parse(text, name="reinforce.yaml", numbered=True).plain()))


def _without_examples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in EXAMPLES}


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
