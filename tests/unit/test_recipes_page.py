"""Losses and advantages of `docs/recipes.md`, step by step: written down, tried, configured and trained with."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamrl.config import schema
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.learner.loading.load import load_policy
from streamrl.learner.metrics.tally import Tally
from streamrl.learner.objective.gradients import Gradients
from streamrl.learner.objective.trial import try_out
from streamrl.learner.process.ranks import World
from streamrl.recipe.algorithms import make_algorithm
from tests.learner_cases import random_groups
from tests.recipes_page import PAGE, blocks, edits, steps
from tests.tiny_models import make_model

RECIPES = ("Add a loss", "Add an advantage")
ALONE = World(rank=0, size=1, device=torch.device("cpu"))
BASE = """
model: {path: model, dtype: float32}
data: {train: prompts.jsonl}
validation: {every_steps: 0}
rewards: {made_up: {type: function, target: exact_match}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user works: with a model, and with what the page has them write."""
    folder = tmp_path_factory.mktemp("work")
    make_model(folder / "model", hidden=32)
    written = [edit for recipe in RECIPES for edit in edits(recipe)]
    assert [edit.file for edit in written] == ["my_recipe.py"] * 2
    (folder / "my_recipe.py").write_text("\n\n".join(edit.text for edit in written))
    return folder


@pytest.fixture(autouse=True)
def working_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield
    sys.modules.pop("my_recipe", None)


@pytest.mark.parametrize("step", [step for recipe in RECIPES for step in steps(recipe)])
def test_what_is_tried_on_numbers_holds(step: str) -> None:
    assert "assert" in step
    exec(step, {})


def configured(text: str, folder: Path) -> schema.Config:
    (folder / "run.yaml").write_text(BASE + text)
    loaded = load_config("run.yaml")
    check_config(loaded.config, loaded.origin)
    return loaded.config


def trained(config: schema.Config) -> tuple[float, dict[str, float]]:
    """The loss and the metrics of a step on the tiny model."""
    try_out(config)
    torch.manual_seed(0)
    policy = load_policy(config, ALONE, (1,))
    gradients = Gradients(
        policy=policy,
        reference=lambda batch: torch.full_like(batch.behaviour_logprobs, -1.0),
        algorithm=make_algorithm(config.algorithm),
        config=config,
        world=ALONE,
        beat=lambda: None,
    )
    tally = Tally(sources=("made_up",), step=5, is_dead=lambda _version, _step: False)
    loss = gradients.accumulate(gradients.prepare(random_groups(3), tally), tally)
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)
    return loss, tally.metrics(ALONE)


def test_the_configurations_train_with_what_was_written(folder: Path) -> None:
    plain, _ = trained(configured("", folder))
    with_loss, with_advantages = (
        trained(configured(block, folder)) for recipe in RECIPES for block in blocks(recipe, "yaml")
    )
    assert with_loss[0] != pytest.approx(plain, rel=1e-3)
    assert with_advantages[0] != pytest.approx(plain, rel=1e-3)
    named = set(re.findall(r"`(loss/\w+)`", PAGE.read_text()))
    assert len(named) == 2
    assert named <= set(with_loss[1])
    assert with_loss[1]["loss/bonus"] == pytest.approx(0.02 * with_loss[1]["policy/entropy"], rel=1e-4)
