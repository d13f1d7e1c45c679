"""Which reward sources are only logged, so that no sample fails without their scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load_config
from streamrl.config.logged import needed_for

ALWAYS = {"train", "eval"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rewards.exact.weight=0.1"], ALWAYS),
        (["rewards.exact.weight=0"], set()),
        (["rewards.exact.weight=0", "validation.pass_by=exact"], {"eval"}),
        (["rewards.exact.weight=0", "checkpoint.best_by=val_rollouts/rewards/exact"], {"eval"}),
        (["rewards.exact.weight=0", "algorithm.advantages='mine.py:advantages'"], ALWAYS),
        (["rewards.exact.weight=0", "rewards.g={type: function, target: 'mine.py:g', of_group: true}"], ALWAYS),
        (["rewards.exact.weight=0", "rewards.g={type: function, target: 'mine.py:g'}"], set()),
    ],
)
def test_a_source_is_only_logged_if_it_has_weight_0_and_nothing_else_goes_by_it(
    good: Path, overrides: list[str], expected: set[str]
) -> None:
    assert needed_for(load_config(good, overrides).config)["exact"] == expected


def test_a_source_of_groups_of_weight_0_is_only_logged(good: Path) -> None:
    config = load_config(good, ["rewards.g={type: function, target: 'mine.py:g', of_group: true, weight: 0}"]).config
    assert needed_for(config) == {"exact": ALWAYS, "g": set()}
